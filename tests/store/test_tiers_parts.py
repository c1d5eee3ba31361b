"""The tiers' parts by themselves: intervals, counts of uses, the eviction policy, sizes in words."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError
from kvwire.store import TierSettings, parse_size
from kvwire.store.cache.disk_tier import ExtentName
from kvwire.store.cache.eviction import SegmentedLru
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
    """Least recently used, which the order is compared with."""

    def __init__(self, _budget):
        self.order, self.bytes = {}, 0

    def touched(self, name):
        if name in self.order:
            self.order[name] = self.order.pop(name)

    def resize(self, name, change):
        self.order[name] = self.order.pop(name, 0) + change
        self.bytes += change

    def evict(self):
        name = next(iter(self.order))
        self.bytes -= self.order.pop(name)
        return name


class Naive:
    """``SegmentedLru`` in the plainest words: rows of name, size and whether it was used again, in order of use."""

    def __init__(self, budget):
        self.rows, self.most = [], int(budget * 0.8)

    @property
    def bytes(self):
        return sum(size for _, size, _ in self.rows)

    def touched(self, name):
        found = next((row for row in self.rows if row[0] == name), None)
        if found:
            self.rows.remove(found)
            self.rows.append((name, found[1], True))
        self.demote()

    def resize(self, name, change):
        found = next((row for row in self.rows if row[0] == name), (name, 0, False))
        self.rows = [row for row in self.rows if row != found]
        if found[1] + change:
            self.rows.append((name, found[1] + change, found[2]))
        self.demote()

    def evict(self):
        once = [row for row in self.rows if not row[2]]
        gone = (once or self.rows)[0]
        self.rows.remove(gone)
        return gone[0]

    def demote(self):
        """The one that was used again longest ago counts as used once, just now."""
        while sum(size for _, size, again in self.rows if again) > self.most:
            first = next(row for row in self.rows if row[2])
            self.rows.remove(first)
            self.rows.append((*first[:2], False))


class Tier:
    """What a tier does with an order, at the level of whole objects."""

    def __init__(self, order, budget):
        self.order, self.budget, self.held = order, budget, set()
        self.hits, self.gone = 0, []

    def use(self, key, size):
        self.order.touched(key)
        if key in self.held:
            self.hits += 1
            return
        self.held.add(key)
        self.order.resize(key, size)
        while self.order.bytes > self.budget:
            self.gone.append(self.order.evict())
            self.held.remove(self.gone[-1])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), max_size=100), st.integers(0, 300))
def test_objects_go_in_the_order_of_the_naive_twin_and_the_budget_holds(uses, budget):
    tiers = [Tier(kind(budget), budget) for kind in (SegmentedLru, Naive)]
    for number, size in uses:
        for tier in tiers:
            tier.use(bytes([number]), size)
        assert tiers[0].gone == tiers[1].gone
        assert tiers[0].order.bytes == tiers[1].order.bytes <= budget


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-40, 40)), max_size=60))
def test_objects_that_grow_and_shrink_are_counted_like_the_naive_twin(changes):
    orders, sizes = (SegmentedLru(100), Naive(100)), Counter()
    for number, change in changes:
        name = bytes([number])
        bounded = max(change, -sizes[name])
        sizes[name] += bounded
        for order in orders:
            order.touched(name)
            if bounded:
                order.resize(name, bounded)
        assert orders[0].bytes == orders[1].bytes == sum(sizes.values())
    assert [orders[0].evict() for _ in +sizes] == [orders[1].evict() for _ in +sizes]


def test_what_was_used_again_outlives_any_number_of_objects_that_are_read_once():
    tier = Tier(SegmentedLru(1000), 1000)
    for _ in range(2):
        for number in range(5):
            tier.use(bytes([number]), 100)
    for number in range(100):
        tier.use(b"once %d" % number, 100)
    assert {bytes([number]) for number in range(5)} <= tier.held


def zipf(rng, objects, length, skew=1.0):
    weights = [1 / rank**skew for rank in range(1, objects + 1)]
    return rng.choices(range(objects), weights, k=length)


def hit_rates(trace, budget):
    tiers = [Tier(kind(budget), budget) for kind in (Lru, SegmentedLru)]
    for number in trace:
        for tier in tiers:
            tier.use(number.to_bytes(4, "big"), 1)
    return [tier.hits / len(trace) for tier in tiers]


def test_on_a_skewed_trace_with_scans_it_hits_more_often_than_lru():
    rng = random.Random(2)
    trace = []
    for part in range(20):
        trace += zipf(rng, 300, 400)
        trace += range(1000 + 200 * part, 1200 + 200 * part)  # each read once, never again
    lru, ours = hit_rates(trace, 60)
    assert ours > lru + 0.05


def test_conversations_that_go_on_hit_as_often_as_with_lru():
    """Each is used a few times in a row among others, and then never again."""
    rng, left, trace, started = random.Random(3), {}, [], 0
    for _ in range(5000):
        if len(left) < 40:
            left[started], started = rng.randint(2, 12), started + 1
        name = rng.choice(list(left))
        trace.append(name)
        left[name] -= 1
        left = {each: more for each, more in left.items() if more}
    lru, ours = hit_rates(trace, 100)
    assert ours > lru - 0.02
