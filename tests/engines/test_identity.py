"""What a model's revision follows, and what it does not: its weights and the configuration that runs them, no more."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvwire.engines.transformers import open_engine, weight_files
from kvwire.engines.transformers.identity import model_revision
from kvwire.engines.transformers.revisions import RevisionsFile
from kvwire.engines.transformers.tokenizing import PieceTokenizer
from kvwire.errors import ArgumentError, KvwireError, MismatchError

from .families import FAMILIES, cache_error, config_of, documents, make_model
from .test_opening import saved  # noqa: F401 - a fixture

LONG_AGO = 10**18  # nanoseconds


@pytest.fixture
def folder(saved, tmp_path):  # noqa: F811
    return shutil.copytree(saved, tmp_path / "copy")


def rewritten(folder, **changes):
    """Write config.json with changed fields."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def meta_of(folder):
    return open_engine(folder).meta


# ---------------------------------------------------------------- what counts


def test_every_number_of_every_tensor_counts(folder):
    before = model_revision(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.2.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[-1] += 1e-3
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        assert model_revision(folder) != before


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 9e4}},
     {"layer_types": ["sliding_attention"] * 3}, {"max_position_embeddings": 99}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_fields_that_the_computation_reads_count(folder, changes):
    before = model_revision(folder)
    rewritten(folder, **changes)
    assert model_revision(folder) != before


# ---------------------------------------------------------------- what does not


def test_what_computes_nothing_does_not_count(folder):
    before = meta_of(folder)
    rewritten(
        folder, transformers_version="4.1", use_cache=False, torch_dtype="bfloat16", _name_or_path="elsewhere",
        initializer_range=0.5, attention_dropout=0.3, eos_token_id=[2, 5], architectures=None,
    )  # fmt: skip
    save_file({"unused": torch.ones(3)}, folder / "consolidated.safetensors")
    (folder / "optimizer.bin").write_bytes(b"state")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": "{{ messages }}", "model_max_length": 77, "clean_up_tokenization_spaces": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert meta_of(folder).config_digest() == before.config_digest()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_transformers_writes_anew_is_the_same_model(family, tmp_path):
    make_model(config_of(family)).save_pretrained(tmp_path / "one")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "other", max_shard_size="60KB")
    assert len(list((tmp_path / "other").glob("*.safetensors"))) > 1
    assert model_revision(tmp_path / "one") == model_revision(tmp_path / "other")


def test_what_old_files_hold_beside_the_weights_does_not_count(folder):
    before = model_revision(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    rewritten(folder, unsloth_version="1", pretraining_tp=1, quantization_config={}, chunk_size_feed_forward=0)
    assert model_revision(folder) == before
    rewritten(folder, rope_parameters={"rope_type": "default", "rope_theta": 10000})
    assert model_revision(folder) == before


def test_weights_under_another_name_are_refused(folder):
    rewritten(folder, transformers_weights="other.safetensors")
    with pytest.raises(MismatchError, match=r"rename them to model\.safetensors"):
        open_engine(folder)


@pytest.mark.parametrize("changes", [{"text_config": 5}, {"hidden_size": "x"}, {"rope_parameters": 5}], ids=str)
def test_configurations_that_make_no_model_are_told(folder, changes):
    rewritten(folder, **changes)
    with pytest.raises(KvwireError):
        open_engine(folder)


def test_old_and_new_spellings_of_a_configuration_are_the_same(folder):
    before = model_revision(folder)
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": None}))
    assert model_revision(folder) == before


# ---------------------------------------------------------------- the tokenizer


def test_the_tokenizers_digest_follows_its_behaviour(folder):
    before = meta_of(folder)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = "{{ messages }}"
    loaded.save_pretrained(folder)
    assert meta_of(folder).tokenizer_digest == before.tokenizer_digest != ""
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"]["more"] = 8
    (folder / "tokenizer.json").write_text(json.dumps(words))
    changed = meta_of(folder)
    assert changed.tokenizer_digest != before.tokenizer_digest
    assert changed.model_revision == before.model_revision
    loaded.add_tokens(["extra"])
    assert PieceTokenizer(loaded).digest not in {before.tokenizer_digest, changed.tokenizer_digest}


# ---------------------------------------------------------------- models that the caller loaded


def loaded_from(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


class Other(torch.nn.Linear):
    """A module of another class."""


class Mine(transformers.LlamaForCausalLM):
    """A model of another class."""


def attends_otherwise(config):
    """The same configuration with an attention of its own."""
    transformers.AttentionInterface.register("mine", lambda *_args, **_kwargs: None)
    own = copy.deepcopy(config)
    own._attn_implementation = "mine"
    return own


def tripled(inner):
    """Three times what a function gives, under its name."""
    return functools.wraps(inner)(lambda *given: inner(*given) * 3)


def wrapped_hook():
    return functools.wraps(transformers.models.llama.modeling_llama.rotate_half)(lambda _m, _i, output: output * 3)


CHANGES = {
    "row": lambda model: model.model.layers[1].mlp.up_proj.weight[40].add_(0.01),
    "rotation": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "buffer": lambda model: model.model.layers[1].register_buffer("more", torch.ones(1)),
    "bias": lambda model: setattr(
        model.model.layers[0].mlp.down_proj,
        "bias",
        torch.nn.Parameter(model.model.layers[0].input_layernorm.weight.data),
    ),
    "added module": lambda model: model.model.layers[0].add_module("adapter", torch.nn.Linear(2, 2)),
    "dropped layer": lambda model: model.model.layers.pop(2),
    "module's class": lambda model: setattr(model.model.layers[0].mlp.up_proj, "__class__", Other),
    "model's class": lambda model: setattr(model, "__class__", Mine),
    "number": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 2.0),
    "activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.ReLU()),
    "configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.1),
    "inner configuration": lambda model: (
        setattr(model.model, "config", copy.deepcopy(model.config)),
        setattr(model.model.config, "rms_norm_eps", 0.1),
    ),
    "attention": lambda model: (attends_otherwise(model.config), model.set_attn_implementation("mine")),
    "inner attention": lambda model: setattr(
        model.model.layers[0].self_attn, "config", attends_otherwise(model.config)
    ),
    "hook": lambda model: model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output),
    "early hook": lambda model: model.model.register_forward_pre_hook(lambda _module, inputs: inputs),
    "wrapped hook": lambda model: model.model.layers[0].mlp.register_forward_hook(wrapped_hook()),
    "forward": lambda model: setattr(model.model.layers[0].mlp, "forward", lambda hidden: hidden),
    "wrapped forward": lambda model: setattr(
        model.model.layers[0].mlp, "forward", tripled(model.model.layers[0].mlp.forward)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_computes_something_else_is_refused(saved, change):  # noqa: F811
    model = loaded_from(saved)
    with torch.no_grad():
        CHANGES[change](model)
    with pytest.raises(MismatchError, match=r"save_pretrained|load it with"):
        open_engine(saved, model=model)


def test_a_bias_that_is_left_out_is_told(tmp_path):
    make_model(config_of("glm")).save_pretrained(tmp_path)
    model = loaded_from(tmp_path)
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    model.model.layers[0].self_attn.q_proj.bias = None
    with pytest.raises(MismatchError, match="bias is there"):
        open_engine(tmp_path, model=model)


def test_a_hook_of_all_modules_is_refused(saved):  # noqa: F811
    model = loaded_from(saved)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda _m, _i, output: output)
    try:
        with pytest.raises(MismatchError, match="hook"):
            open_engine(saved, model=model)
    finally:
        hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_as_transformers_loads_it_is_taken(family, tmp_path):
    make_model(config_of(family)).save_pretrained(tmp_path)
    model = loaded_from(tmp_path)
    model(input_ids=torch.tensor([documents()[0]]), output_hidden_states=True)  # which installs hooks of transformers'
    assert open_engine(tmp_path, model=model).meta == open_engine(tmp_path).meta


# ---------------------------------------------------------------- adapters


def lora(folder, alpha=8, seed=0):
    """An adapter of random numbers."""
    peft = pytest.importorskip("peft")
    base = loaded_from(folder)
    torch.manual_seed(seed)
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return made


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_an_adapter_makes_another_model(saved, tmp_path):  # noqa: F811
    plain = open_engine(saved)
    lora(saved).save_pretrained(tmp_path / "a")
    base = loaded_from(saved)
    base.load_adapter(tmp_path / "a")
    adapted = open_engine(saved, model=base)
    assert adapted.meta.model_revision != plain.meta.model_revision
    assert cache_error(adapted.prefill(documents())[1], plain.prefill(documents())[1]) > 0.1
    named = loaded_from(saved)
    named.load_adapter(tmp_path / "a", adapter_name="other name")
    assert open_engine(saved, model=named).meta == adapted.meta
    base.disable_adapters()
    assert open_engine(saved, model=base).meta == plain.meta


@pytest.mark.filterwarnings("ignore")
def test_scales_and_numbers_of_adapters_count(saved, tmp_path):  # noqa: F811
    seen = {open_engine(saved).meta.model_revision}
    for number, made in enumerate((lora(saved), lora(saved, alpha=16), lora(saved, seed=1))):
        folder = shutil.copytree(saved, tmp_path / str(number))
        made.save_pretrained(folder)
        inside = open_engine(folder)
        assert inside.meta.model_revision not in seen
        seen.add(inside.meta.model_revision)
        beside = loaded_from(saved)
        beside.load_adapter(folder)
        assert open_engine(saved, model=beside).meta.model_revision == inside.meta.model_revision
    assert len(seen) == 4


@pytest.mark.filterwarnings("ignore")
def test_a_hook_on_an_adapter_is_refused(saved, tmp_path):  # noqa: F811
    lora(saved).save_pretrained(tmp_path / "a")
    base = loaded_from(saved)
    base.load_adapter(tmp_path / "a")
    base.model.layers[0].self_attn.v_proj.lora_A["default"].register_forward_hook(lambda _m, _i, output: output * 2)
    with pytest.raises(MismatchError, match="lora_A"):
        open_engine(saved, model=base)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("LoraConfig", {"alora_invocation_tokens": None}, {"alora_invocation_tokens": [5]}),
        ("OFTConfig", {"coft": False}, {"coft": True}),
    ],
)
def test_what_adapters_keep_beside_their_numbers_counts(saved, kind, one, other):  # noqa: F811
    peft = pytest.importorskip("peft")
    size = {"r": 0, "oft_block_size": 4} if kind == "OFTConfig" else {"r": 2}
    seen = []
    for options in (one, other):
        torch.manual_seed(0)
        base = loaded_from(saved)
        base.add_adapter(getattr(peft, kind)(target_modules=["q_proj"], task_type="CAUSAL_LM", **size, **options))
        seen.append(open_engine(saved, model=base).meta.model_revision)
    assert len({*seen, open_engine(saved).meta.model_revision}) == 3


@pytest.mark.filterwarnings("ignore")
def test_merged_adapters_and_wrapped_models_are_refused(saved):  # noqa: F811
    made = lora(saved)
    with pytest.raises(MismatchError, match="PeftModel"):
        open_engine(saved, model=made)
    with pytest.raises(MismatchError, match="merged"):
        open_engine(saved, model=made.merge_and_unload())


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_needs_its_package(saved, tmp_path, monkeypatch):  # noqa: F811
    folder = shutil.copytree(saved, tmp_path / "copy")
    lora(saved).save_pretrained(folder)
    monkeypatch.setattr("kvwire.engines.transformers.opening.is_peft_available", lambda: False)
    with pytest.raises(ArgumentError, match="pip install peft"):
        open_engine(folder)


# ---------------------------------------------------------------- what is remembered of large weights


@pytest.fixture
def large(folder, monkeypatch):
    """A folder whose weights count as large, and have not changed lately."""
    monkeypatch.setattr(weight_files, "_REMEMBERED", 1)
    for path in folder.iterdir():
        os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return folder


@pytest.fixture
def revisions(tmp_path):
    return RevisionsFile(tmp_path / "caches" / "revisions.json")


@pytest.fixture
def read(monkeypatch):
    """Places of the tensors that are hashed."""
    places = []
    hashed = weight_files._hashed

    def recorded(place, tell):
        places.append(place)
        return hashed(place, tell)

    monkeypatch.setattr(weight_files, "_hashed", recorded)
    return places


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(LONG_AGO, LONG_AGO))


def test_a_second_opening_reads_nothing_but_changed_files(large, revisions, read):
    first, weights = model_revision(large, revisions), large / "model.safetensors"
    assert read
    read.clear()
    assert model_revision(large, revisions) == first
    assert read == []
    os.utime(weights, ns=(LONG_AGO, LONG_AGO + 1))
    assert model_revision(large, revisions) == first
    assert read
    os.utime(weights)  # files that have just changed are not remembered
    for _ in range(2):
        read.clear()
        model_revision(large, revisions)
        assert read


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_change_that_the_time_does_not_tell_hashes_anew(large, revisions, is_replaced):
    first, weights = model_revision(large, revisions), large / "model.safetensors"
    changed = large / "other" if is_replaced else weights
    if is_replaced:
        shutil.copy(weights, changed)
    flip(changed, weights.stat().st_size - 70)  # which puts the time back
    changed.replace(weights)
    assert model_revision(large, revisions) != first


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{", b"[" * 100_000, b'{"version": 9}', b'{"version": 2, "revisions": {"a": "b"}}',
     b'{"version": 2, "revisions": []}', b" " * (1 << 19)],
    ids=["empty", "bytes", "list", "cut", "deep", "newer", "digests", "entries", "large"],
)  # fmt: skip
def test_bad_content_is_ignored_and_written_anew(large, revisions, read, content):
    first = model_revision(large, revisions)
    revisions._path.write_bytes(content)
    read.clear()
    assert model_revision(large, revisions) == first
    assert read
    assert len(json.loads(revisions._path.read_bytes())["revisions"]) == 1


def test_entries_are_bounded_and_the_oldest_go(revisions):
    for number in range(300):
        revisions.remember(f"{number + 1000:064x}", f"{number:064x}")
    kept = json.loads(revisions._path.read_bytes())["revisions"]
    assert list(kept.values()) == [f"{number:064x}" for number in range(44, 300)]
    assert [path.name for path in revisions._path.parent.iterdir()] == ["revisions.json"]


def test_a_place_that_cannot_be_written_is_no_error(large, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below.json", tmp_path, None):
        assert model_revision(large, RevisionsFile(path))
    assert (tmp_path / "file").read_text() == ""


def test_the_environment_names_the_file_or_switches_it_off(large, monkeypatch, tmp_path, read):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    model_revision(large)
    assert (tmp_path / "xdg" / "kvwire" / "revisions.json").is_file()
    monkeypatch.setenv("KVWIRE_REVISIONS", str(tmp_path / "named.json"))
    model_revision(large)
    assert (tmp_path / "named.json").is_file()
    monkeypatch.setenv("KVWIRE_REVISIONS", "off")
    read.clear()
    model_revision(large)
    assert read


def test_a_usual_file_that_others_may_write_is_not_trusted(monkeypatch, tmp_path):
    """Who forges a revision has another model's caches taken for this one's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVWIRE_REVISIONS", raising=False)
    usual, key = RevisionsFile.of_environment(), "1" * 64
    usual.remember(key, "a" * 64)
    assert usual.recall(key) == "a" * 64
    path = tmp_path / "kvwire" / "revisions.json"
    path.chmod(0o666)
    assert usual.recall(key) is None
    monkeypatch.setenv("KVWIRE_REVISIONS", str(path))
    assert RevisionsFile.of_environment().recall(key) == "a" * 64
    usual.remember(key, "b" * 64)  # written anew, by this user alone
    assert usual.recall(key) == "b" * 64


def test_a_file_that_vanishes_while_it_is_hashed_is_told(large, monkeypatch):
    def gone(place, tell):
        raise FileNotFoundError(place)

    monkeypatch.setattr(weight_files, "_hashed", gone)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        model_revision(large, RevisionsFile(None))
