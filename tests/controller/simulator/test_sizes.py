from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvwire
from kvwire.controller import DocumentPlanInput
from kvwire.controller.simulator import documents_for, expected_kl, model_named, raw_of, source_in_words
from kvwire.controller.simulator.sizes import BITS, measured
from kvwire.errors import ArgumentError, NotFoundError

DEMO, LLAMA = model_named("demo"), model_named("llama-3.1-8b")


@pytest.mark.parametrize("method", ["kvwire", "kvwire-head-start-1", "kvwire-head-start-2", "cachegen"])
def test_documents_have_sizes_that_grow_and_errors_that_fall(method):
    (document,) = documents_for(LLAMA, [1000], method=method)
    assert document.tokens == (256, 256, 256, 232)
    for sizes, errors in zip(document.fetch_bytes, document.errors, strict=True):
        assert list(sizes) == sorted(set(sizes))
        assert list(errors) == sorted(set(errors), reverse=True)
        assert 0 < errors[-1] < errors[0] < 1
    assert document.layered == (method != "cachegen")


def test_the_same_seed_gives_the_same_documents():
    assert documents_for(LLAMA, [5000, 300], seed=3) == documents_for(LLAMA, [5000, 300], seed=3)
    assert documents_for(LLAMA, [5000, 300], seed=3) != documents_for(LLAMA, [5000, 300], seed=4)


def mean_bits(model, document):
    """Of whole chunks behind the first, by level."""
    rows = [row for row, tokens in zip(document.fetch_bytes[1:], document.tokens[1:], strict=True) if tokens == 256]
    return [8 * sum(column) / len(rows) / 256 / model.cache_elements for column in zip(*rows, strict=True)]


def test_the_demonstration_takes_the_rates_of_its_own_documents():
    (document,) = documents_for(DEMO, [2560])
    known = [chunk.bits for chunk in measured()["kvwire"].others]
    for sizes in document.fetch_bytes[1:]:
        bits = [8 * size / (256 * DEMO.cache_elements) for size in sizes]
        assert any(bits == pytest.approx(row, rel=1e-3) for row in known)


@pytest.mark.parametrize("method", BITS)
def test_other_models_take_the_rates_of_a_real_one(method):
    (document,) = documents_for(LLAMA, [256 * 400], method=method)
    assert mean_bits(LLAMA, document) == pytest.approx(BITS[method], rel=0.1)
    (easy,) = documents_for(DEMO, [256 * 400], method=method)
    assert all(hard / bits > 2 for hard, bits in zip(mean_bits(LLAMA, document), mean_bits(DEMO, easy), strict=True))


def test_the_rates_of_the_real_model_are_those_that_were_saved():
    saved = json.loads((Path(__file__).parents[3] / "benchmarks/results/real_model.json").read_text())
    codecs = saved["results"]["kinds"]["all"]["codecs"]
    rows = [codecs[f"kvwire {name}"] for name in kvwire.Ladder().names]
    assert BITS["kvwire"] == pytest.approx([row["bits_per_element"]["mean"] for row in rows], rel=0.01)
    assert expected_kl(LLAMA) == pytest.approx([row["kl"]["mean"] for row in rows], rel=0.01)


def test_every_source_has_its_words():
    assert "demonstration" in source_in_words(DEMO)
    assert "SmolLM2" in source_in_words(LLAMA)


def test_a_head_start_is_a_share_of_the_demonstration_model():
    shares = [measured()[name].prefix_share for name in ("kvwire", "kvwire-head-start-1", "kvwire-head-start-2")]
    assert shares == pytest.approx([0, 1 / 6, 2 / 6], rel=1e-4)
    assert documents_for(DEMO, [100], method="kvwire-head-start-1")[0].prefix_share == shares[1]


def test_a_raw_document_is_its_bytes_without_error():
    document = raw_of(LLAMA, DocumentPlanInput((256, 44)))
    assert document.tokens == (256, 44)
    assert document.fetch_bytes == ((256 * 131_072,), (44 * 131_072,))
    assert document.errors == ((0.0,), (0.0,))


def test_impossible_documents_are_refused():
    with pytest.raises(ArgumentError):
        documents_for(DEMO, [0])
    with pytest.raises(NotFoundError, match="cachegen"):
        documents_for(DEMO, [100], method="zip")


def test_the_measured_methods_are_those_that_the_codec_has_now():
    assert measured()["kvwire"].levels == kvwire.Ladder().names
    for rates in measured().values():
        assert len(rates.firsts) > 1
        assert len(rates.others) > 10
        assert {len(chunk.bits) for chunk in (*rates.firsts, *rates.others)} == {len(rates.levels)}
