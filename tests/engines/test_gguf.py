"""GGUF files open as the models that they hold; nothing half-made is ever used."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import pytest
import torch

from kvwire.engines.transformers import gguf as converting
from kvwire.engines.transformers import open_engine
from kvwire.errors import ArgumentError, CorruptError, MismatchError, StorageError

gguf = pytest.importorskip("gguf", reason="GGUF files need gguf: pip install 'kvwire[gguf]'")
LETTERS = [chr(256 + byte) if byte < 33 or byte == 127 else chr(byte) for byte in range(128)]
WORDS = ["<s>", "</s>", "<|im_end|>", *LETTERS, "th"]
HIDDEN, HEADS, LAYERS, INNER = 32, 4, 2, 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"


def write(path, architecture="llama", seed=0, without=()):
    """A Llama of two layers with a tokenizer of bytes."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def tensor(name, *shape):
        data = random.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        if name not in without:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)

    kind = gguf.GGMLQuantizationType.Q8_0
    tensor("token_embd.weight", len(WORDS), HIDDEN)
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN), ("attn_k", HIDDEN // 2, HIDDEN), ("attn_v", HIDDEN // 2, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN), ("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):  # fmt: skip
            tensor(f"blk.{layer}.{name}.weight", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("KVWIRE_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def test_a_file_and_its_folder_open_as_the_same_model(tmp_path, place, monkeypatch):
    file = write(tmp_path / "tiny.Q8_0.gguf")
    engine = open_engine(file)
    assert engine.meta.model_id == "tiny.Q8_0"
    assert (len(engine.meta.layers), engine.window, engine.dtype) == (LAYERS, 256, torch.bfloat16)
    assert engine.detokenize(engine.tokenize("the lamp")) == "the lamp"
    assert engine.tokenizer.chat_template == TEMPLATE
    assert 2 in engine.end_tokens
    (folder,) = place.iterdir()
    monkeypatch.setattr(converting, "_convert", None)  # it is not converted again
    again = open_engine(str(tmp_path), dtype=torch.float32)
    assert again.meta.config_digest() == open_engine(folder, dtype=torch.float32).meta.config_digest()
    assert again.meta.model_revision == engine.meta.model_revision
    (cache,) = again.prefill([again.tokenize("the lamp was lit")])
    assert bool(torch.isfinite(cache.keys[0]).all())


def test_another_file_of_the_same_name_is_another_model(tmp_path, place):
    revisions = {open_engine(write(tmp_path / "m.gguf", seed=seed)).meta.model_revision for seed in (0, 1)}
    assert len(revisions) == 2
    assert len(list(place.iterdir())) == 2


def test_conversions_that_were_killed_are_not_used_and_go(tmp_path, place, monkeypatch):
    file = write(tmp_path / "m.gguf")
    inner = converting._convert

    def killed(source, folder):
        inner(source, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "_convert", killed)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if nothing could be tidied any more
    with pytest.raises(KeyboardInterrupt):
        open_engine(file)
    monkeypatch.undo()
    monkeypatch.setenv("KVWIRE_MODELS", str(place))
    (left,) = place.iterdir()
    assert left.name.startswith(".")
    old = time.time() - 100_000
    os.utime(left, (old, old))
    open_engine(file)
    assert [each.name.startswith(".") for each in place.iterdir()] == [False]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[: len(data) // 2], "copy it again"),
        (lambda data: data[:100], "copy it again"),
        (lambda data: b"PK\3\4" + data[4:], "no GGUF file"),
        (lambda data: data[:0], "no GGUF file"),
    ],
)
def test_damaged_files_are_told(tmp_path, place, spoil, words):
    file = write(tmp_path / "m.gguf")
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(CorruptError, match=words):
        open_engine(file)
    assert not place.exists() or not list(place.iterdir())


def test_a_file_that_lacks_tensors_is_refused(tmp_path, place):
    file = write(tmp_path / "m.gguf", without=("blk.1.ffn_down.weight", "blk.1.attn_q.weight"))
    with pytest.raises(CorruptError, match="lacks or misshapes 2 tensors"):
        open_engine(file)
    assert not list(place.iterdir())
    part = write(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ArgumentError, match="merge the parts"):
        open_engine(part)


def test_what_cannot_be_converted_is_told(tmp_path, place, monkeypatch):
    with pytest.raises(MismatchError, match="architectures"):
        open_engine(write(tmp_path / "m.gguf", architecture="unheard-of"))
    write(tmp_path / "n.gguf")
    with pytest.raises(ArgumentError, match="2 GGUF files"):
        open_engine(tmp_path)
    with pytest.raises(ArgumentError, match="no revisions"):
        open_engine(tmp_path / "n.gguf", revision="main")
    monkeypatch.setenv("KVWIRE_MODELS", "off")
    with pytest.raises(ArgumentError, match="KVWIRE_MODELS"):
        open_engine(tmp_path / "n.gguf")
    taken = tmp_path / "taken"
    taken.write_text("no folder")
    monkeypatch.setenv("KVWIRE_MODELS", str(taken))
    with pytest.raises(StorageError, match="make room"):
        open_engine(tmp_path / "n.gguf")
    monkeypatch.setenv("KVWIRE_MODELS", str(place))
