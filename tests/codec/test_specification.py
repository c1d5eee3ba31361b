"""A second decoder, written from docs/format.md alone, agrees with the codec on the golden files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvwire.codec import decode, inspect
from kvwire.codec.format.codecs import CODEC_LOSSLESS

from . import surgery as cut
from .by_the_text import TextPredictor
from .write_golden import BEGINNING, CONTEXT, GOLDEN, OFFSET, SECTIONS, SINKS, STEM, assert_alike, read_golden

TOLD, PROFILES = read_golden(STEM)
LATER = {stem: read_golden(stem) for stem in (f"{STEM}-packed", SECTIONS, SINKS, BEGINNING, CONTEXT)}


def outcomes(name, level, offset, stem=STEM, told=TOLD, profiles=PROFILES, *, begins=False):
    """What both decoders make of a level: pairs of one plane's tensors."""
    blob, used = (GOLDEN / f"{stem}-{name}.kvw").read_bytes(), told["blobs"][name]["profile"]
    hidden = torch.tensor(told["hidden"])
    stored = (GOLDEN / used).read_bytes() if used else None
    cache = decode(blob, level, profiles.get(used), offset=offset, hidden=hidden, dtype=torch.float32, begins=begins)
    found = TextPredictor(blob, stored, hidden.double().numpy(), begins=begins).decode(level, offset)
    assert len(found) == 2 * sum(spec.kind != "none" for spec in cache.meta.layers)
    for (side, layer), part in found.items():
        yield (cache.keys if side == "key" else cache.values)[layer].double().numpy(), part


@pytest.mark.parametrize("name", TOLD["blobs"])
def test_a_decoder_made_from_the_specification_agrees(name):
    blob = (GOLDEN / f"{STEM}-{name}.kvw").read_bytes()
    for level in range(len(inspect(blob).levels)):
        for ours, theirs in outcomes(name, level, OFFSET):
            assert_alike(ours, theirs)


@pytest.mark.parametrize(
    ("stem", "name"), [(stem, name) for stem, (told, _) in LATER.items() for name in told["blobs"]]
)
def test_so_it_does_with_packed_profiles_with_sections_and_with_sinks(stem, name):
    blob = (GOLDEN / f"{stem}-{name}.kvw").read_bytes()
    for level in range(len(inspect(blob).levels)):
        for ours, theirs in outcomes(name, level, OFFSET, stem, *LATER[stem]):
            assert_alike(ours, theirs)


@pytest.mark.parametrize("name", LATER[BEGINNING][0]["blobs"])
def test_a_document_that_begins_a_prompt_has_another_first_token(name):
    for level in range(3):
        both = [list(outcomes(name, level, 0, BEGINNING, *LATER[BEGINNING], begins=begins)) for begins in (True, False)]
        for (ours, theirs), (elsewhere, _) in zip(*both, strict=True):
            assert_alike(ours, theirs)
            assert np.array_equal(ours[:, 1:], elsewhere[:, 1:])
        assert any(
            not np.allclose(ours[:, 0], other[:, 0], atol=0.2) for (ours, _), (other, _) in zip(*both, strict=True)
        )


@pytest.mark.parametrize("name", TOLD["blobs"])
def test_lossless_levels_are_equal_to_the_bit(name):
    blob = (GOLDEN / f"{STEM}-{name}.kvw").read_bytes()
    levels, offset = cut.metadata(blob)["levels"], cut.metadata(blob)["offset"]
    for level in [k for k, (_, codec, *_) in enumerate(levels) if codec == CODEC_LOSSLESS]:
        for ours, theirs in outcomes(name, level, offset):
            assert np.array_equal(ours, theirs)


def test_the_golden_files_have_everything():
    """Levels of every kind, prediction from tokens and from hidden states, rows of 8 bits, pruned entries, escapes."""
    used = {codec for name in TOLD["blobs"] for _, codec, *_ in metadata(name)["levels"]}
    assert used == {1, 2, 3}
    assert {name: bool(metadata(name)["kept_bytes"]) for name in ("named", "pruned")} == {
        "named": False,
        "pruned": True,
    }
    assert metadata("hidden")["head_start"] == 1
    assert PROFILES[f"{STEM}.kvp"].table is not None
    arrays = {row[0]: row[1] for row in cut.profile_metadata((GOLDEN / f"{STEM}-small.kvp").read_bytes())["arrays"]}
    assert arrays["g0.rows"] == "|i1"
    assert arrays["points"] == "<u2"


def test_golden_files_with_sinks_have_them_in_two_chunks():
    for name in LATER[SINKS][0]["blobs"]:
        info = inspect((GOLDEN / f"{SINKS}-{name}.kvw").read_bytes())
        assert [info.chunks_of(at, at + 1)[0] for at in info.sinks] == [0, 1]


def metadata(name):
    return cut.metadata((GOLDEN / f"{STEM}-{name}.kvw").read_bytes())
