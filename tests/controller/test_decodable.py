"""Which refinements are decoded where not all that came can be in time."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import DecodeCost
from kvwire.controller.refining import decodable

COST = DecodeCost(0.002, 2e-6, 1.4e-10)


def columns(rows, levels=5, *, straight=False):
    """Levels before and after, tokens, sizes and errors of chunks, each of which is some times as large as usual.

    straight: Each level adds as much, and takes away as much.
    """
    valid, level, tokens, scale = (np.array(each) for each in zip(*rows, strict=True))
    number = np.arange(levels)[:, None]
    sizes = (scale * (1e6 * (1 + number) if straight else 2e5 * 2.3**number)).astype(np.int64)
    errors = scale * 0.02 * (1 - 0.19 * number if straight else 4.0**-number)
    return valid, np.maximum(valid, level), tokens, sizes, errors


def chosen_of(left_s, valid, level, tokens, sizes, errors, **more):
    return decodable(left_s, valid, level, tokens=tokens, sizes=sizes, errors=errors, cost=COST, **more)


def seconds(levels, valid, tokens, sizes, threads=1):
    each = [
        COST.token_s * tokens[at] + COST.byte_s * int(sizes[level, at])
        for at, level in enumerate(levels)
        if level > valid[at]
    ]
    return max(sum(each) / threads, max(each, default=0.0))


def error(levels, tokens, errors):
    return float(sum(tokens[at] * errors[level, at] for at, level in enumerate(levels)))


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from((17, 256, 256)), st.sampled_from((0.5, 1.0, 1.3))),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300)
@given(rows=ROWS, left_s=st.floats(-0.001, 0.02), threads=st.sampled_from((1, 2, 4)), straight=st.booleans())
def test_what_is_decoded_fits_and_never_exceeds_what_came(rows, left_s, threads, straight):
    valid, level, tokens, sizes, errors = columns(rows, straight=straight)
    chosen = chosen_of(left_s, valid, level, tokens, sizes, errors, threads=threads)
    assert ((valid <= chosen) & (chosen <= level)).all()
    assert seconds(chosen, valid, tokens, sizes, threads) <= max(left_s, 0.0) * (1 + 1e-9) + 1e-12
    if seconds(level, valid, tokens, sizes, threads) <= left_s:
        assert (chosen == level).all()


@settings(max_examples=200)
@given(rows=ROWS, left_s=st.floats(0, 0.02))
def test_no_uniform_level_that_fits_leaves_much_less_error(rows, left_s):
    """At most what one chunk gains: the step that did not fit any more."""
    valid, level, tokens, sizes, errors = columns(rows)
    chosen = chosen_of(left_s, valid, level, tokens, sizes, errors)
    one = max(error(valid[[at]], tokens[[at]], errors[:, [at]]) for at in range(len(valid)))
    for cap in range(int(valid.min()) + 1, 5):
        lowered = np.maximum(valid, np.minimum(level, cap))
        if seconds(lowered, valid, tokens, sizes) <= left_s:
            assert error(chosen, tokens, errors) <= error(lowered, tokens, errors) + one


def test_few_chunks_come_close_to_the_best_choice():
    draw = np.random.default_rng(1)
    lost = []
    for _ in range(60):
        rows = [(int(draw.integers(0, 3)), 4, 256, float(draw.uniform(0.5, 1.5))) for _ in range(4)]
        valid, level, tokens, sizes, errors = columns(rows)
        left_s = float(draw.uniform(0.1, 1.0)) * seconds(level, valid, tokens, sizes)
        chosen = chosen_of(left_s, valid, level, tokens, sizes, errors)
        ways = product(*(range(low, high + 1) for low, high in zip(valid, level, strict=True)))
        best = min(error(way, tokens, errors) for way in ways if seconds(way, valid, tokens, sizes) <= left_s)
        lost.append(error(chosen, tokens, errors) / best - 1)
    assert np.median(lost) < 0.1
