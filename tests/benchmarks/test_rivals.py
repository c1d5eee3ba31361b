"""The rivals that kvwire is compared with: their published arithmetic by hand, and streams that really decode."""

from __future__ import annotations

import itertools
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

import kvwire
from kvwire.types import CacheMeta, LayerSpec, RopeRegime

_FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, _FOLDER)
from rivals import bfloat16, kivi, kvtc, kvtc_one_step, kvtc_scaled, layout, per_token  # noqa: E402

sys.path.remove(_FOLDER)


def _cache(tokens=256, layers=3, heads=2, dim=32, seed=0, rank=12):
    """Correlated keys and values under a rotary regime, positions on."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, rank, layers * heads * dim, generator=torch.Generator().manual_seed(99))
    strength = 2.0 ** -torch.arange(rank).float()
    sides = []
    for side in range(2):
        hidden = torch.randn(tokens, rank, generator=generator) * strength
        matrix = hidden @ mixing[side] + 0.01 * torch.randn(tokens, layers * heads * dim, generator=generator) + 0.5
        sides.append(list(matrix.reshape(tokens, layers, heads, dim).permute(1, 2, 0, 3).contiguous()))
    rope = RopeRegime(tuple(10000.0 ** (-2 * pair / dim) for pair in range(dim // 2)), False, 1.0, None, "default")
    meta = CacheMeta(layers=(LayerSpec(heads, dim, dim, rope=0),) * layers, ropes=(rope,), positions="off")
    return kvwire.codec.positions_on(kvwire.KVCache.from_tensors(*sides, meta))


def _error(cache, decoded):
    pairs = zip([*cache.keys, *cache.values], [*decoded.keys, *decoded.values], strict=True)
    return sum(float((a - b).square().sum()) for a, b in pairs)


def _elements(cache):
    return cache.tokens * cache.meta.elements_per_token


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 64, 1001])
def test_packed_numbers_come_back(bits, count):
    codes = np.random.default_rng(bits).integers(0, 2**bits, count).astype(np.uint8)
    data = layout.pack(codes, bits)
    assert len(data) == layout.packed_bytes(bits, count) == -(-bits * count // 8)
    assert (layout.unpack(data, bits, count) == codes).all()


def test_packing_puts_the_first_number_lowest():
    assert layout.pack(np.array([1, 2, 3, 0], np.uint8), 2) == bytes([0b00_11_10_01])


def test_matrices_come_back_layer_by_layer():
    tensors = [torch.randn(2, 5, 4), torch.empty(0, 5, 0), torch.randn(1, 5, 6)]
    matrix = layout.as_matrix(tensors)
    assert matrix.shape == (5, 14)
    assert torch.equal(matrix[3, :4], tensors[0][0, 3])
    assert all(torch.equal(a, b) for a, b in zip(layout.from_matrix(matrix, tensors), tensors, strict=True))


def test_bfloat16_is_exact_for_bfloat16_and_else_its_rounding():
    cache = _cache()
    stream, decoded = bfloat16.roundtrip(cache)
    for before, after in zip([*cache.keys, *cache.values], [*decoded.keys, *decoded.values], strict=True):
        assert torch.equal(after, before.to(torch.bfloat16).float())
    assert len(stream) * 8 / _elements(cache) < 16
    again, exact = bfloat16.roundtrip(decoded)
    assert again == stream
    assert _error(decoded, exact) == 0


def test_int4_takes_four_and_an_eighth_bits_before_zstd():
    tensor = torch.randn(2, 64, 128)
    assert len(per_token.encode(tensor, 4)) * 8 / tensor.numel() == 4 + 16 / 128 == 4.125
    assert len(per_token.encode(tensor, 8)) * 8 / tensor.numel() == 8.125


def test_int4_by_hand():
    tensor = torch.tensor([[[7.0, -3.4, 3.6, 0.0]]])
    assert per_token.decode(per_token.encode(tensor, 4), (1, 1, 4), 4).tolist() == [[[7.0, -3.0, 4.0, 0.0]]]
    zeros = torch.zeros(1, 2, 4)
    assert torch.equal(per_token.decode(per_token.encode(zeros, 4), (1, 2, 4), 4), zeros)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_err_by_half_a_step_at_most(bits):
    cache = _cache()
    stream, decoded = per_token.roundtrip(cache, bits)
    plain = b"".join(per_token.encode(tensor, bits) for tensor in [*cache.keys, *cache.values])
    assert zstandard.ZstdDecompressor().decompress(stream) == plain
    for before, after in zip([*cache.keys, *cache.values], [*decoded.keys, *decoded.values], strict=True):
        step = before.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((after - before).abs() <= step * 0.5 + 1e-3 * before.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize(("bits", "rate"), [(2, 3.0), (4, 5.0)])
def test_kivi_takes_its_bits_and_one_for_the_scales(bits, rate):
    cache = _cache(tokens=128)
    assert len(kivi.roundtrip(cache, bits)[0]) * 8 / _elements(cache) == rate


def test_kivi_keeps_the_last_tokens_in_16_bits():
    cache = _cache(tokens=256)
    stream, decoded = kivi.roundtrip(cache, 2, residual=128)
    assert len(stream) * 8 / _elements(cache) == (3 + 16) / 2
    for before, after in zip([*cache.keys, *cache.values], [*decoded.keys, *decoded.values], strict=True):
        assert torch.equal(after[:, 128:], before[:, 128:].to(torch.bfloat16).float())
        assert not torch.equal(after[:, :128], before[:, :128].to(torch.bfloat16).float())


def test_kivi_groups_keys_by_channel_and_values_by_token():
    channels = torch.linspace(-8, 8, 32)
    keys = channels.expand(1, 32, 32)  # constant along tokens: a group of one channel is exact
    stream = kivi.encode(keys, 2, 0, per_channel=True)
    assert torch.equal(kivi.decode(stream, (1, 32, 32), 2, 0, per_channel=True), keys.half().float())
    stream = kivi.encode(keys.transpose(1, 2), 2, 0, per_channel=False)
    decoded = kivi.decode(stream, (1, 32, 32), 2, 0, per_channel=False)
    assert torch.equal(decoded, keys.transpose(1, 2).half().float())


def test_kivi_by_hand():
    values = torch.tensor([0.0, 3.0, 0.4, 0.6, 1.4, 1.6, 2.4, 2.6]).repeat(4).reshape(1, 1, 32)
    decoded = kivi.decode(kivi.encode(values, 2, 0, per_channel=False), (1, 1, 32), 2, 0, per_channel=False)
    assert decoded[0, 0, :8].tolist() == [0.0, 3.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize(("tokens", "dim", "residual"), [(1, 32, 0), (33, 48, 0), (100, 20, 128), (100, 32, 30)])
def test_kivi_takes_any_shape(tokens, dim, residual):
    cache = _cache(tokens=tokens, dim=dim)
    _, decoded = kivi.roundtrip(cache, 4, residual)
    assert _error(cache, decoded) < 0.01 * _error(cache, _zeros(cache))


def _zeros(cache):
    return layout.rebuilt(cache, [torch.zeros_like(k) for k in cache.keys], [torch.zeros_like(v) for v in cache.values])


def _brute_force(choices, components, budget):
    """The least error over every cover of the components."""
    if not components:
        return 0.0
    ends = [c for c in choices if c.stop == components and c.cost <= budget]
    return min((c.error + _brute_force(choices, c.start, budget - c.cost) for c in ends), default=np.inf)


@pytest.mark.parametrize("seed", range(6))
def test_allocation_equals_brute_force(seed):
    draw = np.random.default_rng(seed)
    components = 5
    choices = [kvtc.Choice(i, i + 1, 0, 0, float(draw.exponential())) for i in range(components)]
    for start, stop in itertools.combinations(range(components + 1), 2):
        costs, errors = draw.integers(1, 6, 2), draw.exponential(size=2)
        choices += [kvtc.Choice(start, stop, 1 + i, int(costs[i]), float(errors[i])) for i in range(2)]
    budgets = [0, 1, 3, 7, 12]
    for budget, plan in zip(budgets, kvtc.allocate(choices, components, budgets), strict=True):
        assert [c.start for c in plan] == [0, *(c.stop for c in plan[:-1])]
        assert plan[-1].stop == components
        assert sum(c.cost for c in plan) <= budget
        assert sum(c.error for c in plan) == pytest.approx(_brute_force(choices, components, budget))


def test_allocation_by_hand():
    """Energies 16 and 1, each bit a quarter of the error: two bits go to the first before the second gets one."""
    choices = [kvtc.Choice(i, i + 1, b, b, e / 4**b) for i, e in ((0, 16.0), (1, 1.0)) for b in range(4)]
    plans = kvtc.allocate(choices, 2, [0, 1, 2, 3, 4])
    assert [[c.bits for c in plan] for plan in plans] in (
        [[0, 0], [1, 0], [2, 0], [3, 0], [3, 1]],
        [[0, 0], [1, 0], [2, 0], [2, 1], [3, 1]],
    )


def test_basis_is_orthonormal_and_ordered_for_many_tokens_and_for_few():
    for tokens in (400, 30):
        matrix = layout.as_matrix(_cache(tokens=tokens).values)
        basis = kvtc.fit_basis(matrix)
        rank = basis.vectors.shape[1]
        assert rank == min(192, tokens - 1)
        assert torch.allclose(basis.vectors.T @ basis.vectors, torch.eye(rank), atol=1e-3)
        coefficients = basis.analyse(matrix)
        energy = coefficients.square().mean(0)
        assert (energy[:-1] >= energy[1:] * 0.999).all()
        assert torch.allclose(basis.synthesise(coefficients), matrix, atol=1e-3)


def test_fixed_quantiser_by_hand():
    """Two bits, step 1: cells from -2 to 2, their middles the values, what lies outside at the ends."""
    plan = (kvtc.Choice(0, 1, 2, 1, 0.0),)
    quantiser = kvtc.FixedQuantiser(plan, torch.ones(8, 1))
    coefficients = torch.tensor([[-9.0], [-0.2], [0.0], [1.7], [9.0]])
    data = quantiser.encode(coefficients)
    assert data == bytes([0b11_10_01_00, 0b11])
    assert quantiser.decode(data, 5).flatten().tolist() == [-1.5, -0.5, 0.5, 1.5, 1.5]


@pytest.fixture(scope="module")
def calibrated():
    return kvtc.calibrate([_cache(tokens=512, seed=seed) for seed in (1, 2)])


@pytest.mark.parametrize("codec", [kvtc, kvtc_scaled], ids=["fixed", "scaled"])
def test_kvtc_errs_less_with_every_budget_and_keeps_to_it(codec, calibrated):
    cache = _cache()
    budgets = (0.1, 0.25, 0.5, 1.0, 2.0)
    errors = []
    for budget, sides in codec.fit(calibrated, budgets).items():
        stream, decoded = kvtc.roundtrip(cache, sides)
        errors.append(_error(cache, decoded))
        assert decoded.meta.positions == "on"
        raw = 16 * kvtc.SINKS / cache.tokens
        assert len(stream) * 8 / _elements(cache) <= budget + raw + 0.02
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 * _error(cache, _zeros(cache))


def test_one_step_errs_less_with_every_step_and_never_clips(calibrated):
    cache = _cache()
    fitted = kvtc_one_step.fit(calibrated, (2.0, 0.5, 0.1, 0.01))
    sizes, errors = [], []
    for sides in fitted.values():
        stream, decoded = kvtc.roundtrip(cache, sides)
        sizes.append(len(stream))
        errors.append(_error(cache, decoded))
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    step = kvtc_one_step.OneStep(0.5)
    far = torch.tensor([[-700.0, 3.2, 0.0], [900.4, -0.1, 0.1]])
    assert step.decode(step.encode(far), 2).tolist() == [[-700.0, 3.0], [900.5, 0.0]]


def test_kvtc_keeps_sinks_and_tail_in_16_bits(calibrated):
    cache = _cache()
    sides = kvtc.fit(calibrated, (0.25,))[0.25]
    short, _ = kvtc.roundtrip(cache, sides)
    stream, decoded = kvtc.roundtrip(cache, sides, tail=128)
    for before, after in zip(cache.values, decoded.values, strict=True):
        for kept in (slice(0, kvtc.SINKS), slice(128, 256)):
            assert torch.equal(after[:, kept], before[:, kept].to(torch.bfloat16).float())
    raw = 2 * (128 + kvtc.SINKS) * cache.meta.elements_per_token
    assert raw < len(stream) < raw + len(short)
    assert _error(cache, kvtc.roundtrip(cache, sides, tail=10**6)[1]) < 1e-4 * _error(cache, _zeros(cache))


def test_kvtc_deflates_what_its_quantiser_wrote(calibrated):
    cache = _cache()
    sides = kvtc.fit(calibrated, (0.5,))[0.5]
    stream, _ = kvtc.roundtrip(cache, sides)
    raw = 2 * kvtc.SINKS * cache.meta.layers[0].key_width * 3
    unpacked = zlib.decompressobj()
    matrix = layout.as_matrix(kvwire.codec.positions_off(cache).keys)
    wanted = sides[0].quantiser.encode(sides[0].basis.analyse(matrix[kvtc.SINKS :]))
    assert unpacked.decompress(stream[raw:]) == wanted


@pytest.mark.parametrize(("bits", "size"), [(2, 16), (4, 64), (8, 1), (8, 16)])
def test_groups_with_scales_cost_what_is_published(bits, size):
    part = torch.randn(100, size)
    data = kvtc_scaled.encode_group(part, bits)
    scale_bits = 0 if bits == 8 else 32
    assert len(data) * 8 == 100 * (bits * size + scale_bits) == 8 * kvtc_scaled.group_bytes(size, bits, 100)
    decoded = kvtc_scaled.decode_group(data, 100, size, bits)
    if bits == 8:
        assert torch.equal(decoded, part.to(torch.float8_e4m3fn).float())
    else:
        half_step = (part.amax(1, keepdim=True) - part.amin(1, keepdim=True)) / (2**bits - 1) / 2
        assert ((decoded - part).abs() <= half_step + 5e-3).all()
