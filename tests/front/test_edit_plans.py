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
from kvwire.runtime.reports import EditRepair
from kvwire.runtime.similar import EditTerms, ReuseCosts, _Plans
from kvwire.store import Catalog, Donor, MemoryStore
from kvwire.store.records import CatalogEntry
from kvwire.types import KVCache, digest_tokens

BASE = np.random.default_rng(1).permutation(4000)[:600].tolist()
PROMPTS = SimpleNamespace(opening=(), window=4096, max_kl=None)


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


def planned(found, prompt, bandwidth, chosen=None):
    """The best plan of these donors; chosen: of all of them together, if that can be."""
    costs = CostModel(PrefillCost(1e-3, 1e-3), DecodeCost(1e-4, 1e-6), link_s_per_token=1e-6)
    terms = EditTerms(ReuseCosts(costs, bandwidth, 1e-3), EditRepair(0.15, "attention"), Goal(), 16)
    plans = _Plans(PROMPTS, tuple(prompt), terms)
    infos = {one.document.document_id: info for one, info in found}
    for each, _ in found:
        plans.consider(each)
    if chosen is None:
        return plans.best(lambda one: infos[one.document.document_id])
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
        best.script.check([each.token_ids for each in best.donors], prompt)
        assert best.seconds == pytest.approx(planned(found, prompt, bandwidth).seconds)
