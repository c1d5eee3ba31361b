"""The fused way from quantised values to tensors against the plain one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import CacheMeta, KVCache, rotation
from kvwire.codec.entropy.tables import CLASSES, CONTEXTS, fit_tables
from kvwire.codec.format.segment import SegmentState
from kvwire.codec.profile.group import Group
from kvwire.codec.transform import reconstruct
from kvwire.codec.transform.analysis import scatter_planes, synthesise
from kvwire.codec.transform.reconstruct import coefficients_of, place_group
from kvwire.types import LayerSpec, RopeRegime

TABLES = fit_tables(np.zeros((CLASSES, 256)), np.zeros((CLASSES, CONTEXTS, 3)))
ROPES = (RopeRegime((1.0, 0.25)), RopeRegime((0.5, 0.125, 0.01), interleaved=True))
LAYERS = (
    LayerSpec(2, 6, 5, rope=0),  # half-split, partial
    LayerSpec(1, 9, 6, rope=1, value_rope=1),  # interleaved, both sides
    LayerSpec(3, 7, 4, rope=0, key_rope_start=3),  # the rotary part comes last
    LayerSpec(1, 4, 4),  # no positions
)
PLANES = tuple((side, layer) for side in ("key", "value") for layer in range(4))
META = CacheMeta(layers=LAYERS, ropes=ROPES)
WIDTH = META.elements_per_token
SMALL = settings(max_examples=40)
EXACT = pytest.mark.skipif(
    not reconstruct.multiplies_bytes(), reason="oneDNN's sums of bytes overflow on this processor: they are not used"
)


def output(tokens, dtype, *, strided):
    """An empty cache; strided: a slice of a longer one, with heads and tokens in another order in memory."""

    def empty(heads, dim):
        if strided:
            return torch.full((tokens + 5, heads, dim), torch.nan).to(dtype).transpose(0, 1)[:, 2 : 2 + tokens]
        return torch.full((heads, tokens, dim), torch.nan).to(dtype)

    keys = [empty(spec.kv_heads, spec.key_dim) for spec in LAYERS]
    return KVCache.from_tensors(keys, [empty(spec.kv_heads, spec.value_dim) for spec in LAYERS], META)


def problem(seed, tokens, rank, largest, *, rows_of_expected, density=1.0):
    """A chunk's state, a group, what is expected and the step; ``density`` of the values are not zero."""
    rng = np.random.default_rng(seed)
    spread = np.zeros(rank + 3, np.int64)
    state = SegmentState(tokens, spread, TABLES)
    sizes = np.exp(rng.uniform(0, np.log(largest + 1), (tokens, rank + 3)))
    state.values[:] = np.clip(np.sign(rng.standard_normal(sizes.shape)) * sizes, -largest, largest)
    state.classes[:] = rng.integers(0, CLASSES + 1, rank + 3)
    state.values[:, state.classes == 0] = 0
    state.values[rng.random(sizes.shape) >= density] = 0
    made = torch.from_numpy(rng.standard_normal((rank, WIDTH))).bfloat16()
    group = Group(PLANES, np.zeros(WIDTH, np.float32), np.zeros(rank, np.int16), made)
    expected = torch.from_numpy(rng.standard_normal((rows_of_expected, WIDTH))).float()
    of_token = rng.integers(0, rows_of_expected, tokens).astype(np.uint32)
    return state, group, (expected, of_token), float(rng.uniform(0.01, 3))


def plainly(state, group, columns, step, expected, out, start, turns):
    elements = synthesise(coefficients_of(state, columns, step), group, *expected)
    scatter_planes(elements, group.planes, out, META, start, turns)
    return elements


def turns_at(offset, tokens):
    return {} if offset is None else {index: rotation(rope, offset, tokens) for index, rope in enumerate(ROPES)}


def tensors(cache):
    return torch.cat([t.float().permute(1, 0, 2).flatten(1) for t in (*cache.keys, *cache.values)], 1)


ARGUMENTS = (
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.sampled_from([0, 1, 30, 64, 200]),
    st.sampled_from([1.0, 0.3, 0.02]),
    st.sampled_from([2, 200, 256, 300, 65_000, 65_536, 70_000, 2**24]),
    st.sampled_from([None, 0, 1000]),
    st.booleans(),
)


@SMALL
@given(*ARGUMENTS)
def test_float32_is_placed_as_the_plain_way_does(seed, tokens, rank, density, largest, offset, strided):
    rows = 1 + seed % 5
    state, group, expected, step = problem(seed, tokens + 3, rank, largest, rows_of_expected=rows, density=density)
    columns, turns = slice(2, 2 + rank), turns_at(offset, tokens + 3)
    fast, naive = (output(tokens + 7, torch.float32, strided=strided) for _ in range(2))
    place_group(state, group, columns, step, expected, fast, META, 4, turns)
    elements = plainly(state, group, columns, step, expected, naive, 4, turns)
    scale = float(elements.abs().max()) + float(state.values.max(initial=0)) * step
    torch.testing.assert_close(tensors(fast), tensors(naive), atol=1e-5 * scale, rtol=1e-5, equal_nan=True)
    assert tensors(fast)[:4].isnan().all()


def rounding(state, columns, group, step):
    """Most that rounding values and rows to bytes can add to each element: half a place of each."""
    values = np.abs(state.values[:, columns]).astype(np.float64)
    small = torch.from_numpy(np.minimum(values, 7.0))
    pieces = [each.expand(len(rows), -1) for _, rows, each in group.rows_in_bytes(columns.stop)]
    steps = torch.cat([torch.empty(0, WIDTH), *pieces])
    between = torch.from_numpy(((values == 1) | (values == 2)) / 32.0)
    return step * (small @ (steps / 2).double() + between @ (group.rows.abs() + steps).double())


@EXACT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [(), (0, 40), (30, 30, 130)])
@SMALL
@given(*ARGUMENTS)
def test_bytes_are_multiplied_within_half_a_place(dtype, cuts, seed, tokens, rank, density, largest, offset, strided):  # noqa: PLR0917
    state, group, expected, step = problem(seed, tokens, rank, largest, rows_of_expected=2, density=density)
    group = dataclasses.replace(group, cuts=cuts)
    columns, turns = slice(0, rank), turns_at(offset, tokens)
    fast, exact = output(tokens, dtype, strided=strided), output(tokens, torch.float32, strided=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reconstruct, "multiplies_bytes", lambda: True)
        patched.setattr(reconstruct, "_SHORT_SUMS", 0)
        place_group(state, group, columns, step, expected, fast, META, 0, turns, rounded=True)
    elements = plainly(state, group, columns, step, expected, exact, 0, turns)
    scale = float(elements.abs().max()) + float(state.values.max(initial=0)) * step
    most = rounding(state, columns, group, step).amax(1, keepdim=True) * 2**0.5  # a rotation mixes two elements
    away = (tensors(fast) - tensors(exact)).abs().double()
    assert (away <= most + (1e-5 if dtype == torch.float32 else 2.0**-8) * scale).all()


@EXACT
def test_most_columns_of_small_values_are_multiplied_as_bytes(monkeypatch):
    """Against the products of bytes as written in float64, exactly up to the sum's own rounding."""
    monkeypatch.setattr(reconstruct, "multiplies_bytes", lambda: True)
    monkeypatch.setattr(reconstruct, "_SHORT_SUMS", 0)
    state, group, _, _ = problem(1, 30, 200, 7, rows_of_expected=1)
    state.classes[:] = 1
    group = dataclasses.replace(group, cuts=(50, 120))
    nothing = torch.zeros(1, WIDTH), np.zeros(30, np.uint32)
    out = output(30, torch.float32, strided=False)
    place_group(state, group, slice(0, 200), 1.0, nothing, out, META, 0, {}, rounded=True)
    sizes = coefficients_of(state, slice(0, 200), 1.0).double()
    whole = (sizes.abs() * 16 + 0.5).floor() * sizes.sign() / 16
    rows = torch.cat([rows.double() * steps for _, rows, steps in group.rows_in_bytes(200)])
    torch.testing.assert_close(tensors(out).double(), whole @ rows, atol=1e-4, rtol=1e-5)
    assert [begin for begin, _, _ in group.rows_in_bytes(120)] == [0, 50]


@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE"])
def test_bytes_are_not_multiplied_where_their_sums_overflow(isa):
    """The processor may know the instructions while oneDNN is told not to use them."""
    code = "from kvwire.codec.transform.reconstruct import multiplies_bytes; print(multiplies_bytes())"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert told.stdout.strip() == "False"


def test_threads_that_round_rows_at_once_do_not_lose_them(monkeypatch):
    """As if another thread had put its own dictionary between two looks."""
    _, group, _, _ = problem(2, 1, 50, 7, rows_of_expected=1)
    expected = [rows for _, rows, _ in group.rows_in_bytes(50)]
    monkeypatch.setattr(Group, "_pieces_in_bytes", property(lambda _: {}))
    assert all(map(torch.equal, [rows for _, rows, _ in group.rows_in_bytes(50)], expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_other_dtypes_are_what_float32_rounds_to(dtype):
    state, group, expected, step = problem(5, 9, 12, 100, rows_of_expected=2)
    other, exact = output(9, dtype, strided=False), output(9, torch.float32, strided=False)
    for out in (other, exact):
        place_group(state, group, slice(0, 12), step, expected, out, META, 0, turns_at(7, 9))
    most = min(torch.finfo(dtype).max, 3e38)
    near = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-5
    torch.testing.assert_close(
        tensors(other),
        tensors(exact).clamp(-most, most),
        rtol=near,
        atol=max(near, 1e-4) * float(tensors(exact).abs().max()),
    )


def test_nothing_coded_leaves_what_is_expected():
    state, group, expected, step = problem(3, 6, 8, 5, rows_of_expected=4)
    state.classes[:], state.values[:] = 0, 0
    out = output(6, torch.float32, strided=False)
    place_group(state, group, slice(0, 8), step, expected, out, META, 0, {})
    assert torch.equal(tensors(out), expected[0][torch.from_numpy(expected[1].astype(np.int64))])
