"""The tiers' parts by themselves: intervals, counts of uses, the eviction policy, sizes in words."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError
from kvwire.store import TierSettings, parse_size
from kvwire.store.cache.disk_tier import ExtentName
from kvwire.store.cache.eviction import FrequencySketch, WindowTinyLfu
from kvwire.store.cache.extents import ExtentMap

SPAN = 24
RANGES = st.tuples(st.integers(0, SPAN), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.tuples(st.booleans(), RANGES), max_size=30), RANGES)
def test_extents_are_what_a_map_of_bytes_says(changes, asked):
    extents, bytes_ = ExtentMap(), {}
    for number, (adds, (start, end)) in enumerate(changes):
        if adds:
            free = not any(position in bytes_ for position in range(start, end))
            if free:
                extents.add(start, end, number)
                bytes_ |= dict.fromkeys(range(start, end), number)
            else:
                with pytest.raises(ArgumentError):
                    extents.add(start, end, number)
        else:
            for extent in extents.overlapping(start, end):
                assert extents.remove(extent)
                assert not extents.remove(extent)
                bytes_ = {position: value for position, value in bytes_.items() if value != extent.value}
    start, end = asked
    found = extents.at(start)
    assert (found and found.value) == bytes_.get(start)
    assert {position for first, last in extents.gaps(start, end) for position in range(first, last)} == {
        position for position in range(start, end) if position not in bytes_
    }
    assert {one.value for one in extents.overlapping(start, end)} == {
        bytes_[position] for position in range(start, end) if position in bytes_
    }
    beginnings = [one.start for one in extents]
    assert beginnings == sorted(beginnings)
    assert extents.next_start(start) == min((one for one in beginnings if one > start), default=None)
    assert sum(one.length for one in extents) == len(bytes_)


@pytest.mark.parametrize(("start", "end"), [(3, 3), (4, 2), (-1, 2)])
def test_no_extent_is_empty_or_negative(start, end):
    with pytest.raises(ArgumentError):
        ExtentMap().add(start, end, None)


@given(st.lists(st.integers(0, 40)))
def test_a_sketch_never_counts_too_few(uses):
    sketch = FrequencySketch(width=16)
    for use in uses:
        sketch.add(bytes([use]))
    for use, count in Counter(uses).items():
        assert min(15, count) <= sketch.estimate(bytes([use])) <= 15


def test_halving_a_sketch_lets_old_uses_fade():
    sketch = FrequencySketch()
    for _ in range(9):
        sketch.add(b"old")
    sketch.halve()
    assert sketch.estimate(b"old") == 4
    assert sketch.additions == 4


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("1000", 1000), ("1000B", 1000), ("20GB", 20 * 10**9), ("512MiB", 512 << 20)),
        *(("512 MiB", 512 << 20), ("1.5KiB", 1536), ("0.1GB", 10**8), ("3k", 3000), ("2Ti", 2 << 40)),
        ("1PB", 10**15),
    ],
)
def test_sizes_in_words(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "1 2", "1iB", "5XB", "1,5GB", "٣GB", "9" * 30, "nan", "1GBB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentError):
        parse_size(text)


@pytest.mark.parametrize(
    "wrong", [{"flight_bytes": 0}, {"prefetch_threads": 0}, {"dirty_bytes": -1}, {"stall_s": 0}, {"put_s": -1}]
)
def test_settings_that_could_never_work_are_refused(wrong):
    with pytest.raises(ArgumentError):
        TierSettings(**wrong)


@given(st.binary(min_size=32, max_size=32), RANGES)
def test_a_file_name_says_which_extent_it_is(name, span):
    extent = ExtentName(name, *span)
    assert ExtentName.parse(extent.file_name) == extent
    assert ExtentName.parse(extent.file_name.upper()) is None
    assert ExtentName.parse(extent.file_name + "x") is None


class Lru:
    """Least recently used, which the policy is compared with: a list in order of use."""

    def __init__(self):
        self.order = []

    def touched(self, name):
        if name in self.order:
            self.order.append(self.order.pop(self.order.index(name)))

    def added(self, name, _size):
        self.order = [*(one for one in self.order if one != name), name]

    def removed(self, name):
        self.order = [one for one in self.order if one != name]

    def victim(self, _excess):
        return self.order[0]


class Tier:
    """What a tier does with a policy, at the level of whole objects."""

    def __init__(self, policy, budget):
        self.policy, self.budget, self.sizes = policy, budget, {}
        self.hits = 0

    def use(self, key, size):
        self.policy.touched(key)
        if key in self.sizes:
            self.hits += 1
            return
        self.sizes[key] = size
        self.policy.added(key, size)
        while (excess := sum(self.sizes.values()) - self.budget) > 0:
            victim = self.policy.victim(excess)
            del self.sizes[victim]
            self.policy.removed(victim)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), max_size=100), st.integers(0, 100))
def test_the_policy_keeps_within_the_budget_and_gives_up_only_what_is_held(uses, budget):
    tier = Tier(WindowTinyLfu(budget), budget)
    for number, size in uses:
        tier.use(bytes([number]), size)
        assert sum(tier.sizes.values()) <= budget


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), max_size=100))
def test_the_segments_of_tinylfu_hold_what_the_tier_holds(uses):
    tier = Tier(WindowTinyLfu(200), 200)
    for number, size in uses:
        tier.use(bytes([number]), size)
        policy = tier.policy
        segments = (policy._window, policy._probation, policy._protected)
        assert sorted(key for one in segments for key in one.sizes) == sorted(tier.sizes)
        assert all(one.bytes == sum(one.sizes.values()) for one in segments)
        assert not policy._protected.overflows


def test_tinylfu_prefers_what_is_used_often_and_refuses_what_is_not():
    tier = Tier(WindowTinyLfu(1000), 1000)
    for _ in range(5):
        for number in range(10):
            tier.use(bytes([number]), 100)
    tier.use(b"once", 100)
    assert b"once" not in tier.sizes
    for _ in range(8):
        tier.use(b"often", 100)
    assert b"often" in tier.sizes


def test_tinylfu_weighs_a_large_object_against_all_that_would_go_for_it():
    tier = Tier(WindowTinyLfu(1000), 1000)
    for _ in range(3):
        for number in range(10):
            tier.use(bytes([number]), 100)
    for _ in range(8):
        tier.use(b"large", 900)  # more uses than any other, fewer than the nine together
    assert b"large" not in tier.sizes
    assert len(tier.sizes) == 10


def zipf(rng, objects, length, skew=1.0):
    weights = [1 / rank**skew for rank in range(1, objects + 1)]
    return rng.choices(range(objects), weights, k=length)


def hit_rates(trace, sizes, budget):
    rates = {}
    for name, policy in (("lru", Lru()), ("tinylfu", WindowTinyLfu(budget))):
        tier = Tier(policy, budget)
        for number in trace:
            tier.use(number.to_bytes(4, "big"), sizes(number))
        rates[name] = tier.hits / len(trace)
    return rates


def test_on_a_skewed_trace_with_scans_tinylfu_hits_more_often_than_lru():
    rng = random.Random(2)
    trace = []
    for part in range(20):
        trace += zipf(rng, 300, 400)
        trace += range(1000 + 200 * part, 1200 + 200 * part)  # each read once, never again
    rates = hit_rates(trace, lambda _: 1, 60)
    assert rates["tinylfu"] > rates["lru"] + 0.05
