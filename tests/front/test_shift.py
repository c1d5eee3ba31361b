"""The mean shift of linked documents: learnt and judged on a model, kept where it helps, added by loads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kvwire.errors import CorruptError, MismatchError, NotFoundError
from kvwire.reuse import LinkShift
from kvwire.runtime import link_check
from kvwire.runtime.link_check import (
    LEAST_PROMPTS,
    check_links,
    gain_of,
    learn_shift,
    prompts_of,
    shift_figures,
    split_prompts,
)
from kvwire.runtime.reports import LinkReport

from .test_links import REPORT, texts


def random_shift(engine, seed=0, tokens=4, size=0.1):
    """One that is added, whatever it is good for."""
    generator = torch.Generator().manual_seed(seed)
    bounds, layers = (*range(tokens), 100), engine.meta.layers
    keys, values = (
        tuple(size * torch.randn(tokens, spec.kv_heads, width, generator=generator) for spec, width in each)
        for each in ([(s, s.key_dim) for s in layers], [(s, s.value_dim) for s in layers])
    )
    return LinkShift(engine.meta.config_digest(), engine.meta.model_id, 9, bounds, keys, values)


def shifted(report, shift):
    """A report that names a shift."""
    lower = {name: tuple(kl / 2 for kl in row) for name, row in report.repaired.items()}
    gain = (0.01, 0.005, 0.015)
    return replace(
        report, shift=shift.digest, shift_prompts=9, shift_gain=gain, shifted=report.linked / 2, shifted_repaired=lower
    )


def test_prompts_that_teach_are_none_of_those_that_judge():
    long = [list(range(7000)), list(range(10_000, 13_000))]
    judged, learning = split_prompts(long, 3, 48, 4096)
    assert judged == prompts_of(long, 3, 4096)
    assert len(learning) >= LEAST_PROMPTS
    seen = {token for prompt in judged for token in (*prompt.text, *prompt.question, *prompt.rest)}
    assert not seen & {token for prompt in learning for token in (*prompt.text, *prompt.question, *prompt.rest)}
    assert split_prompts([list(range(900))], 3, 48, 4096)[1] == []


def test_a_shift_is_learnt_and_measured(small):
    prompts = prompts_of(texts(small), 3, small.engine.window)
    seen = []
    shift = learn_shift(small.engine, [prompt.documents for prompt in prompts] * 3, tell=seen.append)
    assert seen == list(range(1, 10))
    assert (shift.prompts, shift.tokens) == (9, len(prompts[0].documents[0]))
    report = check_links(small.engine, prompts, shift=shift)  # of the very prompts, so that it helps
    plain = check_links(small.engine, prompts)
    assert (report.linked, report.repaired) == (plain.linked, plain.repaired)
    assert 0 < report.shifted < report.linked
    assert report.shifted_repaired.keys() == report.repaired.keys()
    assert report.shift_prompts == 9
    assert report.shift_gain[1] <= report.shift_gain[0] <= report.shift_gain[2]
    assert report.shift == (shift.digest if report.shift_gain[1] > 0 else "")
    assert LinkReport.of_json(report.to_json()) == report


def test_too_few_prompts_and_latent_models_teach_nothing(small, monkeypatch):
    documents = [prompt.documents for prompt in prompts_of(texts(small), 1, small.engine.window)]
    assert learn_shift(small.engine, documents * (LEAST_PROMPTS - 1)) is None
    assert learn_shift(small.engine, [each[:1] for each in documents] * LEAST_PROMPTS) is None

    def refused(_meta):
        msg = "latent"
        raise MismatchError(msg)

    monkeypatch.setattr(link_check, "ShiftLearner", refused)
    assert learn_shift(small.engine, documents * LEAST_PROMPTS) is None


def row(linked, shifted_kl, five, shifted_five, thirty=0.01, shifted_thirty=0.01):
    return {
        "linked": linked, "shifted": shifted_kl,
        ("attention", 0.05): five, ("shifted", "attention", 0.05): shifted_five,
        ("attention", 0.3): thirty, ("shifted", "attention", 0.3): shifted_thirty,
    }  # fmt: skip


def test_a_shift_is_kept_where_it_surely_helps(small):
    shift = random_shift(small.engine)
    good = [row(0.2, 0.19, 0.1, 0.08 + 0.001 * n) for n in range(6)]
    found = shift_figures(good, shift, ["attention"])
    assert found["shift"] == shift.digest
    assert found["shift_gain"][0] == pytest.approx(0.0175)
    assert found["shifted_repaired"]["attention"] == pytest.approx((0.0825, 0.01))
    unsure = [row(0.2, 0.19, 0.1, 0.08 if n % 2 else 0.11) for n in range(6)]
    assert not shift_figures(unsure, shift, ["attention"])["shift"]
    assert not shift_figures(good[:1], shift, ["attention"])["shift"]
    harmful = [row(0.2, 0.21 + 0.001 * n, 0.1, 0.08 + 0.001 * n) for n in range(6)]
    assert not shift_figures(harmful, shift, ["attention"])["shift"]
    late = [row(0.2, 0.19, 0.1, 0.08, 0.01, 0.02 + 0.001 * n) for n in range(6)]
    assert not shift_figures(late, shift, ["attention"])["shift"]
    unrepaired = [{"linked": 0.2, "shifted": 0.1 + 0.001 * n} for n in range(6)]
    assert shift_figures(unrepaired, shift, [])["shift"] == shift.digest


def test_intervals_are_those_of_students_t():
    assert gain_of([1.0]) == (1.0, -1.0, 1.0)
    mean, low, high = gain_of([1.0, 2.0, 3.0, 4.0])
    assert (mean, low, high) == pytest.approx((2.5, 2.5 - 2.0543, 2.5 + 2.0543), abs=0.03)
    _, low, high = gain_of([0.0, 2.0])
    assert (low, high) == pytest.approx((1 - 12.706, 1 + 12.706), abs=0.001)
    _, low, high = gain_of([float(n % 2) for n in range(400)])
    assert high - low == pytest.approx(2 * 1.966 * 0.5006 / 20, rel=1e-3)


def test_a_report_tells_what_is_left_with_the_shift(small):
    shift = random_shift(small.engine)
    report = shifted(REPORT, shift)
    assert LinkReport.of_json(report.to_json()) == report
    assert report.with_shift().linked == 0.1
    assert report.with_shift().least_share("attention") == 0.05
    assert report.least_share("attention") == 0.15
    assert REPORT.with_shift() is REPORT
    old = {key: value for key, value in json.loads(REPORT.to_json()).items() if not key.startswith("shift")}
    assert LinkReport.of_json(json.dumps(old | {"version": 1}).encode()) == REPORT


@pytest.mark.parametrize(
    "wrong",
    [
        {"shift": 3}, {"shift": "c"}, {"shift_gain": []}, {"shift_gain": [0.1, 0.2]}, {"shift_gain": 3},
        {"shift_prompts": 0}, {"shift_prompts": -1}, {"shifted": -0.1}, {"shifted_repaired": {"attention": [0.1]}},
        {"shifted_repaired": 3}, {"shift_gain": [0.1, 0.2, "x"]},
    ],
)  # fmt: skip
def test_a_report_with_a_shift_that_cannot_be_is_damaged(small, wrong):
    told = json.loads(shifted(REPORT, random_shift(small.engine)).to_json())
    with pytest.raises(CorruptError, match="check-model again"):
        LinkReport.of_json(json.dumps(told | wrong).encode())


def test_a_store_keeps_a_shift_for_its_model(small):
    corpus, shift = small.corpus(), random_shift(small.engine)
    corpus.set_link_shift(shift)
    assert corpus.link_shift(shift.digest).data == shift.data
    with pytest.raises(NotFoundError, match="check-model again"):
        corpus.link_shift("c" * 64)
    with pytest.raises(MismatchError, match="not on this one"):
        corpus.set_link_shift(replace(shift, config="c" * 64))
    other = replace(shift, config="c" * 64)
    corpus.catalog.models.put_link_shift(small.engine.meta.config_digest(), other.data)
    with pytest.raises(MismatchError, match="check-model again"):
        corpus.link_shift(other.digest)


def test_the_command_learns_and_keeps_it(run, demo_model, tmp_path, monkeypatch, brief):
    documents, store = demo_model.parent / "documents", tmp_path / "store"
    words = ("check-model", demo_model, "--documents", documents, "--prompts", 2, "--store", f"file://{store}")
    monkeypatch.setattr(link_check, "gain_of", lambda _: (0.1, 0.05, 0.15))
    monkeypatch.setattr(link_check, "LEAST_PROMPTS", 2)
    code, out, _ = run(*words, "--shift-prompts", 3)
    assert code == 0
    assert "learnt from 3 other prompts" in out
    assert "loads add it" in out
    [kept] = store.rglob("*.kvs")
    code, out, _ = run(*words, "--json", "--shift-prompts", 3)
    assert json.loads(out)["shift"] == kept.stem
    assert LinkShift.of_bytes(kept.read_bytes()).prompts == 3
    code, out, _ = run(*words, "--shift-prompts", 0)
    assert code == 0
    assert "no mean shift was learnt" in out
    monkeypatch.setattr(link_check, "gain_of", lambda _: (0.1, -0.05, 0.15))
    code, out, _ = run(*words, "--shift-prompts", 3)
    assert "is not kept" in out
