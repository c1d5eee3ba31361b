"""What edited caches lose, as it is measured and as loads take it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvwire.errors import ArgumentError, CorruptError
from kvwire.reuse import align
from kvwire.runtime import edit_check
from kvwire.runtime.edit_check import check_edits, edit_prompts
from kvwire.runtime.reports import EditReport, edit_repair


@pytest.fixture(scope="module")
def texts(small):
    return [list(ids) for ids in small.tokens.values()]


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2])
def test_donors_differ_in_about_the_share_that_is_asked_for(texts, share):
    for prompt in edit_prompts(texts, 4, share, 4096):
        script = align([prompt.donor], prompt.text)
        assert 0.4 * share < script.computed / script.tokens < 2.2 * share
        whole = " ".join(map(str, prompt.text))
        assert " ".join(map(str, (*prompt.question, *prompt.value))) in whole
    assert edit_prompts(texts, 4, share, 4096) == edit_prompts(texts, 4, share, 4096)


def test_edits_lose_less_than_the_donor_and_repair_gives_back(small, texts, monkeypatch):
    monkeypatch.setattr(edit_check, "TOKENS", 160)
    monkeypatch.setattr(edit_check, "MEASURED_SELECTORS", ("attention",))
    monkeypatch.setattr(edit_check, "SHARES", (0.3, 1.0))
    told = []
    report = check_edits(small.engine, texts, 2, tell=told.append)
    assert told == list(range(1, 9))
    assert all(kl < donor for kl, donor in zip(report.holes, report.donor, strict=True))
    assert all(kl < 1e-6 for kl in report.repaired["attention"][1])  # all rows are a prefill
    assert EditReport.of_json(report.to_json()) == report


def test_texts_that_are_too_short_are_refused(small):
    with pytest.raises(ArgumentError, match="at least 64 tokens"):
        check_edits(small.engine, [[5] * 20])


def report(holes=(0.4, 0.4), attention=((0.3, 0.3), (0.01, 0.02)), first=((0.2, 0.2), (0.2, 0.001))):
    return EditReport("m", 3, (0.05, 0.2), (1.0, 2.0), holes, (0.05, 0.3), {"attention": attention, "first": first})


@pytest.mark.parametrize(
    ("given", "asked", "wanted"),
    [
        (report(), ("auto", "auto"), (0.3, "attention", True)),
        (report(holes=(0.05, 0.1)), ("auto", "auto"), (0.0, "attention", True)),
        (report(attention=((0.3, 0.3), (0.06, 0.02))), ("auto", "auto"), (0.3, "attention", False)),
        (report(), ("auto", "first"), (0.3, "first", False)),
        (report(), (0.05, "auto"), (0.05, "first", False)),
        (report(), (0.2, "attention"), (0.2, "attention", False)),
        (report(), ("none", "auto"), (0.0, "attention", False)),
        (report(), ("auto", "blend"), (0.15, "blend", False)),
        (None, ("auto", "auto"), (0.15, "attention", False)),
        (None, (0.4, "first"), (0.4, "first", False)),
        (None, ("all", "auto"), (1.0, "attention", False)),
    ],
)
def test_loads_take_the_least_that_is_within_the_bound(given, asked, wanted):
    chosen = edit_repair(given, *asked, 12)
    assert (chosen.share, chosen.selector, chosen.is_safe) == wanted
    assert (chosen.error(0.01) is None) == (given is None or asked == ("auto", "blend"))


def test_the_error_to_expect_is_that_of_the_next_larger_share():
    chosen = edit_repair(report(), "auto", "auto", 12)
    assert [chosen.error(share) for share in (0.01, 0.05, 0.1, 0.9)] == [0.01, 0.01, 0.02, 0.02]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"edited": [0.2, 0.05]}, {"donor": [1.0]}, {"holes": [-1.0, 0.0]},
        {"repaired": {"attention": [[1.0]]}}, {"prompts": 0}, {"repaired": []}, {"shares": 3},
        {"shares": [], "repaired": {}},
    ],
)  # fmt: skip
def test_damaged_reports_are_refused(change):
    data = json.loads(report().to_json()) | change
    with pytest.raises(CorruptError, match="run kvwire check-model --edits again"):
        EditReport.of_json(json.dumps(data).encode())
    with pytest.raises(CorruptError):
        EditReport.of_json(b"\xff")


def test_a_report_is_stored_as_it_was():
    stored = (Path(__file__).parents[1] / "store" / "golden" / "edit-report.json").read_bytes()
    repaired = {"attention": ((0.0005, 0.001), (0.0002, 0.0004))}
    report = EditReport("m", 9, (0.02, 0.1), (1.0, 2.0), (0.001, 0.0025), (0.05, 0.15), repaired)
    assert report.to_json() == stored
    assert EditReport.of_json(stored) == report
