"""Models from the Hub's cache, that the caller has loaded, quantised ones, and ones that are spread."""

import hashlib
import os
import shutil

import pytest
import torch
import transformers
from huggingface_hub import constants

from kvwire import Corpus, Document, generate_inputs
from kvwire.cli.inputs import model_name
from kvwire.engines.transformers import TransformersEngine, open_engine
from kvwire.engines.transformers.identity import find_folder
from kvwire.engines.transformers.opening import open_tokenizer
from kvwire.errors import ArgumentError, CorruptError, MismatchError, NotFoundError
from kvwire.store import MemoryStore

from .families import config_of, documents, engine_of, make_model, query
from .test_generate_inputs import PLAIN, check_equals_masked, linked, masked_greedy
from .test_opening import WORDS, saved  # noqa: F401 - a fixture

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):  # noqa: F811
    """A cache of the Hub with two versions of a model: the older one is tagged, the newer one is the main branch."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    for part in ("blobs", "refs", "refs/tags", "snapshots"):
        (repository / part).mkdir(parents=True, exist_ok=True)
    for seed, commit in enumerate(COMMITS):
        folder = shutil.copytree(saved, tmp_path / commit)
        make_model(config_of("llama"), seed).save_pretrained(folder)
        (repository / "snapshots" / commit).mkdir()
        for path in folder.iterdir():
            blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, blob)
            target = repository / "snapshots" / commit / path.name
            target.symlink_to(os.path.relpath(blob, target.parent))
    (repository / "refs" / "v1").write_text(COMMITS[0])
    (repository / "refs" / "main").write_text(COMMITS[1])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return repository


def test_an_id_of_the_hub_opens_from_its_cache(hub, tmp_path):
    newest = open_engine("someone/tiny")
    assert newest.meta.model_id == "someone/tiny"
    assert newest.tokenize("the same words") == [WORDS[word] for word in ("the", "same", "words")]
    assert open_tokenizer("someone/tiny")("again") == [WORDS["again"]]
    in_folder = open_engine(tmp_path / COMMITS[1])
    assert newest.meta.config_digest() == in_folder.meta.config_digest()
    for revision in ("v1", COMMITS[0]):
        older = open_engine("someone/tiny", revision=revision)
        assert older.meta.model_revision == open_engine(hub / "snapshots" / COMMITS[0]).meta.model_revision
        assert older.meta.model_revision != newest.meta.model_revision
    assert model_name("someone/tiny") == newest.meta.model_revision
    assert model_name("tiny") == "tiny"  # a name in a store's record
    check_equals_masked(newest, [documents()], [query()])


def test_what_the_cache_lacks_is_not_downloaded(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name, revision, command in (
        ("someone/else", None, "hf download someone/else$"),
        ("someone/tiny", "v2", "hf download someone/tiny --revision v2$"),
        ("no such name!", None, "is no folder"),
    ):
        with pytest.raises(NotFoundError, match=command):
            open_engine(name, revision=revision)
    (hub / "snapshots" / COMMITS[1] / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"config\.json is missing"):
        open_engine("someone/tiny")
    with pytest.raises(ArgumentError, match="has no revisions"):
        open_engine(tmp_path / COMMITS[0], revision="v1")
    assert find_folder(str(tmp_path / COMMITS[0])) == (tmp_path / COMMITS[0], COMMITS[0])


def test_a_model_that_the_caller_loaded_has_the_folders_caches(saved):  # noqa: F811
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    ours, usual = open_engine(saved, model=model), open_engine(saved)
    assert ours.model is model
    assert ours.meta == usual.meta
    assert ours.model_config_digest == usual.model_config_digest
    assert ours.tokenize("again") == [WORDS["again"]]
    store = MemoryStore()
    corpus = Corpus(usual, store)
    assert list(corpus.encode([Document("a", tuple(documents()[0]))]))
    assert Corpus(ours, store).decode("a").token_ids == tuple(documents()[0])
    half = open_engine(saved, model=transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16))
    assert half.meta.config_digest() == usual.meta.config_digest()
    assert half.dtype == torch.bfloat16


def test_a_model_of_other_weights_is_no_model_of_the_folder(saved, tmp_path):  # noqa: F811
    with pytest.raises(MismatchError, match="trained, merged or loaded from elsewhere"):
        open_engine(saved, model=make_model(config_of("llama"), 7))
    trained = transformers.AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        trained.model.layers[1].self_attn.q_proj.weight[0, 0] += 0.01
    with pytest.raises(MismatchError, match=r"layers\.1\.self_attn\.q_proj"):
        open_engine(saved, model=trained)
    with pytest.raises(MismatchError, match="gpt_neox"):
        open_engine(saved, model=make_model(config_of("gpt-neox")))
    spoilt = shutil.copytree(saved, tmp_path / "spoilt")
    weights = spoilt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CorruptError, match="copy the model's files again"):
        open_engine(spoilt, model=make_model(config_of("llama")))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cpu", "device_map": "auto"}, "leave device out"),
        ({"device": "cpu", "model": True}, "stays as it is"),
        ({"dtype": torch.bfloat16, "model": True}, "stays as it is"),
        ({"device_map": "auto", "model": True}, "stays as it is"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other(saved, options, reason):  # noqa: F811
    if options.get("model"):
        options = options | {"model": engine_of("llama").model}
    with pytest.raises(ArgumentError, match=reason):
        open_engine(saved, **options)


def test_a_quantised_model_runs_as_it_was_loaded():
    """Of torch's own kind, whose linear layers hold packed int8: such a model is passed as it is."""
    model = make_model(config_of("llama"))
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(parent, name, Rounded(child))
    engine = TransformersEngine(model)
    check_equals_masked(engine, [documents()], [query()])
    assert engine.statistics(documents()[:1], sensitivity=False).value_metric == (None, None, None)
    rounded, exact = (masked_greedy(each, documents(), query(), 1)[1] for each in (engine, engine_of("llama")))
    assert not torch.equal(rounded, exact)


class Rounded(torch.nn.Module):
    """A linear layer of int8 weights with a step for each row."""

    def __init__(self, linear):
        super().__init__()
        step = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / step).round().to(torch.int8))
        self.register_buffer("step", step)

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight * self.step)


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_folders_open_where_they_are(saved, tmp_path, bits):  # noqa: F811
    for package in ("accelerate", "bitsandbytes"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    settings = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32} if bits == 4 else {"load_in_8bit": True}
    settings = transformers.BitsAndBytesConfig(**settings)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(saved, quantization_config=settings, dtype=torch.float32)
    own = open_engine(saved, model=model)
    assert own.meta.model_revision != open_engine(saved).meta.model_revision
    model.save_pretrained(tmp_path / "quantised")
    engine = open_engine(tmp_path / "quantised", device="cpu")
    assert "bitsandbytes" in type(engine.model.model.layers[0].mlp.up_proj).__module__
    assert open_engine(tmp_path / "quantised", model=engine.model).meta == engine.meta
    for each in (own, engine):
        inputs = generate_inputs(each, linked(each), query())
        out = each.model.generate(**inputs, **PLAIN)
        assert out[0, 6:].tolist() == masked_greedy(each, documents(), query())[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("away", ["model.layers.2", "model.embed_tokens"])
def test_models_whose_weights_wait_on_the_disk(saved, tmp_path, away):  # noqa: F811
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{n}" for n in range(3)]
    places = dict.fromkeys(parts, "cpu") | {away: "disk"}
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(saved, device_map=places, offload_folder=tmp_path / "off", dtype=torch.float32)
    engine = open_engine(saved, model=model)
    assert engine.device.type == "cpu"
    assert engine.meta == open_engine(saved).meta
    check_equals_masked(engine, [documents()], [query()])
    if away.endswith("embed_tokens"):
        with pytest.raises(MismatchError, match="offloaded"):
            engine.statistics(documents()[:1], sensitivity=False)
    check_equals_masked(open_engine(saved, device_map="cpu"), [documents()], [query()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")
def test_models_that_are_spread_over_processor_and_gpu(saved):  # noqa: F811
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    parts = ("model.norm", "model.rotary_emb", "lm_head", "model.layers.1", "model.layers.2")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu"} | dict.fromkeys(parts, 0)
    load = transformers.AutoModelForCausalLM.from_pretrained
    engine = open_engine(saved, model=load(saved, device_map=places, dtype=torch.float32))
    check_equals_masked(engine, [documents()], [query()])


def test_a_device_map_needs_its_package(saved):  # noqa: F811
    if transformers.utils.is_accelerate_available():
        pytest.skip("accelerate is installed")
    with pytest.raises(ArgumentError, match="accelerate"):
        open_engine(saved, device_map="auto")
