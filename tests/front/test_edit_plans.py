"""Plans of edits against brute force: every choice of donors, costed."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import encode, read_header
from kvwire.controller import CostModel, DecodeCost, Goal, PrefillCost
from kvwire.reuse import common_spans
from kvwire.runtime.donor_search import FIRST_SEARCHES, TRIED_AGAIN, SearchYield
from kvwire.runtime.reports import EditRepair
from kvwire.runtime.similar import EditPlanner, EditTerms, ReuseCosts, search_can_pay
from kvwire.store import Catalog, Donor, MemoryStore
from kvwire.store.records import CatalogEntry
from kvwire.types import KVCache, digest_tokens

BASE = np.random.default_rng(1).permutation(4000)[:600].tolist()


def donor(name, ids, is_large):
    """With rows that take many bytes, or few."""
    rows = torch.randn(1, len(ids), 16) if is_large else torch.ones(1, len(ids), 16)
    blob = encode(KVCache.from_tensors([rows], [rows], token_ids=ids), chunk_tokens=64)
    info = read_header(blob)
    digest = digest_tokens(ids)
    key = Catalog(MemoryStore()).keys("c0" * 32).blob(digest)
    entry = CatalogEntry(name, key, digest, len(blob), info.header_bytes, len(ids), digest, "", ())
    return Donor(entry, tuple(ids)), info


@st.composite
def cases(draw):
    seed = draw(st.integers(0, 2**32))
    random, found = np.random.default_rng(seed), []
    for number in range(draw(st.integers(1, 5))):
        start = random.integers(0, 400)
        ids = BASE[start : start + random.integers(40, 200)]
        for at in random.integers(0, len(ids) - 3, random.integers(0, 6)):
            ids[at : at + 3] = random.integers(5000, 9000, 3).tolist()
        found.append(donor(f"d{number}", ids, draw(st.booleans())))
    prompt = BASE[random.integers(0, 100) : random.integers(300, 600)]
    return found, prompt, draw(st.sampled_from([1e4, 1e5, 1e7]))


def planned(found, prompt, bandwidth, chosen=None, *, least=False):
    """The best plan of these donors; chosen: of all of them together, if that can be; least: its lower bound."""
    costs = CostModel(PrefillCost(1e-3, 1e-3), DecodeCost(1e-4, 1e-6), link_s_per_token=1e-6)
    terms = EditTerms(ReuseCosts(costs, bandwidth, 1e-3), EditRepair(0.15, "attention"), Goal(), 16, 4096)
    infos = {one.document.document_id: info for one, info in found}
    plans = EditPlanner(tuple(prompt), terms, None, lambda one: infos[one.document.document_id])
    for each, _ in found:
        plans.consider(each)
    if least:
        return plans.least_s()
    if chosen is None:
        return plans.best()
    plans._infos = {at: infos[found[at][0].document.document_id] for at in chosen}
    return plans._plan(chosen)


def test_a_donor_that_is_slow_to_fetch_gives_way_to_one_that_shares_less():
    found = [donor("large", [*BASE[:300], 7], is_large=True), donor("small", [*BASE[:280], 8], is_large=False)]
    plan = planned(found, BASE[:320], 1e4)
    assert [each.document.document_id for each in plan.donors] == ["small"]
    assert plan.seconds < planned(found, BASE[:320], 1e4, (0,)).seconds


@settings(max_examples=20, deadline=None)
@given(cases())
def test_no_donor_alone_is_better_and_few_choices_are(case):
    found, prompt, bandwidth = case
    texts = {one.document.token_digest for one, _ in found}
    best = planned(found, prompt, bandwidth)
    able = [
        at for at, (one, _) in enumerate(found)
        if sum(span.tokens for span in common_spans(one.token_ids, prompt, 0)) >= 16
    ] if len(texts) == len(found) else []  # fmt: skip
    for count in (1, 2, 3, 4):
        for chosen in combinations(able, count):
            other = planned(found, prompt, bandwidth, chosen)
            assert best is not None
            assert best.seconds <= other.seconds * (1 if count == 1 else 1.1) + 1e-12
    if best is not None:
        assert planned(found, prompt, bandwidth, least=True) <= best.seconds
        best.script.check([each.token_ids for each in best.donors], prompt)
        assert best.seconds == pytest.approx(planned(found, prompt, bandwidth).seconds)


def test_a_search_has_to_pay_with_the_best_donor_there_can_be():
    """Requests of the search, bytes where they are known, repaired rows and the last tokens count."""
    costs = CostModel(PrefillCost(0.0, 1e-3), DecodeCost(0.0, 0.0))

    def pays(ttfb_s=1e-3, share=0.15, token_bytes=0.0, bandwidth=1e6, last=32):
        return search_can_pay(ReuseCosts(costs, bandwidth, ttfb_s), 1032, last, share, token_bytes)

    assert pays()  # 0.005 + 0.15 + 0.032 s of 0.774
    assert pays(ttfb_s=0.118)
    assert not pays(ttfb_s=0.119)
    assert pays(token_bytes=580)
    assert not pays(token_bytes=600)
    assert pays(token_bytes=600, bandwidth=2e6)
    assert not pays(share=0.75)
    assert not pays(last=740)


def found(saved_s, size=0, reused=0):
    plan = SimpleNamespace(rival_s=1.0, seconds=1.0 - saved_s) if saved_s else None
    best = SimpleNamespace(size=size, script=SimpleNamespace(reused=reused)) if reused else None
    return SimpleNamespace(plan=plan, best=best)


def test_searches_that_bring_nothing_are_left_out_until_they_bring_something():
    known, searched = SearchYield(), []
    for _ in range(FIRST_SEARCHES + 4 * TRIED_AGAIN):
        searched.append(known.is_due())
        if searched[-1]:
            known.note(0.01, found(0.0))
    assert all(searched[:FIRST_SEARCHES])
    assert sum(searched[FIRST_SEARCHES:]) == 4
    while not known.is_due():
        pass
    known.note(0.01, found(0.5))
    assert all(known.is_due() for _ in range(3))
    for _ in range(100):  # one in ten saves fifty times what a search takes
        for saved_s in (0.5, *[0.0] * 9):
            assert known.is_due()
            known.note(0.01, found(saved_s))


def test_a_search_that_failed_took_its_time():
    known = SearchYield()
    for _ in range(FIRST_SEARCHES):
        known.note(0.5, None)
    assert not known.is_due()


def test_the_least_bytes_of_a_token_are_kept():
    known = SearchYield()
    known.note(0.01, found(0.0))
    assert known.token_bytes == 0
    for size in (400, 300, 500):
        known.note(0.01, found(0.0, size, 100))
    assert known.token_bytes == 3
