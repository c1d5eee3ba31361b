"""Model folders: what opens, what is refused and how, and what tells two of them apart."""

import errno
import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvwire.engines.transformers import open_engine, opening
from kvwire.engines.transformers.identity import model_revision
from kvwire.errors import ArgumentError, CorruptError, MismatchError, NotFoundError, StorageError

from .families import (
    EAGER,
    FAMILIES,
    cache_error,
    config_of,
    documents,
    engine_of,
    error_between,
    make_model,
    query,
    tokens,
    typical_error,
)

WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "the": 4, "same": 5, "words": 6, "again": 7}


def save(folder, family="llama", seed=0):
    make_model(config_of(family), seed).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a tokenizer, not to be written to."""
    folder = save(tmp_path_factory.mktemp("model") / "tiny")
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))  # noqa: S106 - no password
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that may be spoilt."""
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_opens_as_it_was(family, tmp_path):
    engine = open_engine(save(tmp_path / "named", family))
    wanted = engine_of(family)
    assert engine.meta.layers == wanted.meta.layers
    assert engine.meta.ropes == wanted.meta.ropes
    assert engine.meta.model_id == "named"
    assert engine.meta.tokenizer_digest == ""
    assert (engine.model.config._attn_implementation == "eager") == (family in EAGER)
    assert cache_error(engine.prefill(documents())[1], wanted.prefill(documents())[1]) < 1e-5
    half = open_engine(tmp_path / "named", dtype=torch.bfloat16)
    assert half.meta.dtype == "bfloat16"
    assert half.meta.layers == wanted.meta.layers
    assert half.meta.ropes == wanted.meta.ropes
    assert half.meta.model_revision == engine.meta.model_revision
    assert typical_error(half.prefill(documents())[1], wanted.prefill(documents())[1]) < 0.1


def test_weights_open_in_the_type_that_they_are_stored_in(tmp_path):
    make_model(config_of("llama")).to(torch.bfloat16).save_pretrained(tmp_path)
    assert open_engine(tmp_path).meta.dtype == "bfloat16"
    assert open_engine(str(tmp_path), dtype=torch.float32).meta.dtype == "float32"


def test_text_is_read_without_special_tokens(saved):
    engine = open_engine(saved)
    assert engine.has_tokenizer
    assert engine.tokenize("the same words") == [4, 5, 6]
    assert engine.detokenize([4, 5, 6]) == "the same words"
    assert len(engine.meta.tokenizer_digest) == 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda:77"}, "cannot be used"),
        ({"device": "no such device"}, "cannot be used"),
        ({"dtype": torch.int8}, "floating point"),
    ],
)
def test_a_device_or_a_type_that_no_model_runs_in(saved, options, words):
    with pytest.raises(ArgumentError, match=words):
        open_engine(saved, **options)


def test_what_is_not_there(folder, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotFoundError, match=r"config\.json is missing"):
            open_engine(path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match="complete"):
        open_engine(folder)


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), StorageError, "permissions"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "out of memory"),
    ],
)
def test_a_disk_that_fails_is_told_and_other_failures_pass_through(saved, monkeypatch, failure, error, words):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(opening.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(error, match=words):
        open_engine(saved)
    monkeypatch.setattr(opening, "model_revision", fail)
    with pytest.raises(error, match=words):
        open_engine(saved)


class Marked:
    """What runs code when a pickle of it is read."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return open, (str(self._path), "x")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_a_pickle_is_not_read(folder, tmp_path, name):
    """Neither a sound one, nor one that torch refuses, nor one that would run code."""
    (folder / "model.safetensors").unlink()
    model = make_model(config_of("llama"))
    for weights in (model.state_dict(), model, {"lm_head.weight": Marked(tmp_path / "ran")}):
        torch.save(weights, folder / name)
        with pytest.raises(MismatchError, match="only safetensors are read") as caught:
            open_engine(folder)
        assert "save_pretrained" in str(caught.value)
        assert name in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["weights.bin", "../weights.safetensors", "/weights.safetensors"])
def test_an_index_leads_to_safetensors_beside_it_alone(folder, tmp_path, name):
    torch.save({"lm_head.weight": Marked(tmp_path / "ran")}, folder / "weights.bin")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    names = list(make_model(config_of("llama")).state_dict())
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))
    with pytest.raises(MismatchError, match="only safetensors beside it"):
        open_engine(folder)
    assert not (tmp_path / "ran").exists()
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(CorruptError, match="no index"):
            open_engine(folder)
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")})
    )
    assert open_engine(folder).meta.layers == engine_of("llama").meta.layers


def test_a_pickle_beside_safetensors_is_not_read(folder, tmp_path):
    torch.save({"lm_head.weight": Marked(tmp_path / "ran")}, folder / "pytorch_model.bin")
    assert open_engine(folder).meta.layers == engine_of("llama").meta.layers
    (folder / "model.safetensors").rename(folder / "another.safetensors")
    with pytest.raises(NotFoundError, match="complete"):
        open_engine(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        *[("config.json", content, CorruptError, r"config\.json") for content in (b"{", b"[]", b"\xff")],
        ("config.json", b'{"model_type": "unheard-of"}', MismatchError, "unheard-of"),
        ("config.json", b'{"model_type": "vit"}', MismatchError, "causal language model"),
        *[("model.safetensors", keep, CorruptError, "copy the model's files again") for keep in (0, 4, 100, 200, -1)],
        *[
            ("tokenizer.json", content, CorruptError, "copy its files again")
            for content in (b"{", b"{}", b'{"version": "1.0", "model": 3}')
        ],
    ],
)
def test_a_damaged_file(folder, name, content, error, words):
    """Of other content, or cut."""
    path = folder / name
    path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(error, match=words):
        open_engine(folder)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("num_hidden_layers", 2, "lack"), ("intermediate_size", 32, "copy the model's files again")],
)
def test_weights_of_another_configuration(folder, tmp_path, field, value, words):
    config = config_of("llama")
    setattr(config, field, value)
    make_model(config).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    with pytest.raises(CorruptError, match=words):
        open_engine(folder)


def test_a_configuration_that_cannot_be_computed_with(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 0}))
    with pytest.raises(MismatchError, match="cannot be opened as a causal language model"):
        open_engine(folder)


def test_an_encoder_is_told_before_its_weights_are_missed(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    with pytest.raises(MismatchError, match="an encoder with a decoder"):
        open_engine(folder)


def test_a_missing_tokenizer_leaves_token_ids(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    engine = open_engine(folder)
    assert engine.prefill([tokens(9)])[0].tokens == 9
    assert not engine.has_tokenizer
    with pytest.raises(NotFoundError, match=r"put tokenizer\.json beside the weights"):
        engine.tokenize("text")


def test_code_in_the_folder_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names, "model_type": "own"}))
    (folder / "own.py").write_text("raise SystemExit('this ran')\n")
    with pytest.raises(MismatchError):
        open_engine(folder)
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    assert open_engine(folder).meta.layers == engine_of("llama").meta.layers  # the built-in class serves


def test_the_revision_does_not_name_the_folder(saved, folder, tmp_path):
    renamed = shutil.move(folder, tmp_path / "other name")
    assert model_revision(renamed) == model_revision(saved) == open_engine(renamed).meta.model_revision


@pytest.mark.parametrize("name", ["ebook-llama-14m", "stories260K"])
def test_trained_models(shared_dir, name):
    path = shared_dir / "models" / name
    if not path.is_dir():
        pytest.skip(f"needs {name}")
    engine = open_engine(path, dtype=torch.float32)
    ids = engine.tokenize("Once upon a time there was a little house at the edge of a deep wood.")
    assert engine.detokenize(ids).strip().startswith("Once upon a time")
    (cache,) = engine.prefill([ids])
    question = ids[-5:]
    with torch.no_grad():
        whole = engine.model(input_ids=torch.tensor([ids + question])).logits[0, -len(question) :]
    ours = engine.forward(engine.past_key_values(cache), question, len(ids))
    assert error_between(ours, whole) < 1e-5
    statistics = engine.statistics([ids, question, query()])
    assert all(metric is not None for metric in statistics.query_metric)
    assert all(metric is not None for metric in statistics.value_metric)
