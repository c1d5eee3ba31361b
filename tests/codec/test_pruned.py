"""What stands for pruned entries before the transform: near the exact conditional mean, and fewer bytes."""

import numpy as np
import pytest
import torch

from kvwire.codec import encode, inspect
from kvwire.codec.transform import analysis
from kvwire.types import KVCache

from .synthetic import make_cache


def fill_naive(centred, pruned, matrix, variances):
    """The exact minimum of the coefficients' squares over their variances, token by token."""
    out = np.where(pruned, 0.0, centred.astype(np.float64))
    form = (matrix / variances) @ matrix.T
    for row, free in zip(out, pruned, strict=True):
        if free.any() and not free.all():
            row[free] = -np.linalg.lstsq(form[np.ix_(free, free)], form[np.ix_(free, ~free)] @ row[~free])[0]
    return out


def test_pruned_entries_are_filled_as_by_an_exact_solution():
    generator = np.random.default_rng(5)
    basis, _ = np.linalg.qr(generator.normal(size=(24, 24)))
    variances = np.geomspace(30.0, 0.3, 20).astype(np.float32)
    matrix = basis[:, :20].astype(np.float32)
    centred = (generator.normal(size=(40, 20)) * np.sqrt(variances) @ matrix.T).astype(np.float32)
    pruned = generator.random((40, 6)).repeat(4, 1) < 0.5
    pruned[0], pruned[1] = False, True
    wanted = fill_naive(centred, pruned, matrix.astype(np.float64), variances)
    filled = torch.from_numpy(centred.copy())
    analysis.fill_pruned(filled, torch.from_numpy(pruned), torch.from_numpy(matrix), torch.from_numpy(variances))
    made = filled.numpy()
    assert (made[~pruned] == centred[~pruned]).all()
    assert not made[1].any()

    def cost(elements):
        return float((np.square(elements @ matrix) / variances).sum())

    zeros = np.where(pruned, 0.0, centred)
    assert cost(wanted) <= cost(made) < cost(wanted) + 0.05 * (cost(zeros) - cost(wanted))


@pytest.mark.parametrize("rank", [1, 3, 8, 20])
def test_more_pruned_entries_than_coefficients_are_filled_with_no_huge_numbers(rank):
    generator = np.random.default_rng(rank)
    for variances in (np.geomspace(3.0, 1.0, rank), np.geomspace(1e5, 1e-3, rank)):
        matrix = generator.normal(size=(40, rank)).astype(np.float32)
        matrix[::7] = 0.0
        centred = generator.normal(size=(100, 40)).astype(np.float32)
        pruned = generator.random((100, 40)) < generator.random((100, 1))
        filled = torch.from_numpy(centred.copy())
        given = (torch.from_numpy(array.astype(np.float32)) for array in (matrix, variances))
        analysis.fill_pruned(filled, torch.from_numpy(pruned), *given)
        made, zeros = filled.numpy(), np.where(pruned, 0.0, centred)
        assert (made[~pruned] == centred[~pruned]).all()
        assert np.abs(made).max() < 1e4
        before, after = ((np.square(each @ matrix) / variances).sum(1) for each in (zeros, made.astype(np.float64)))
        assert (after <= 1.0001 * before).all()


def test_half_pruned_caches_take_fewer_bytes_than_with_predictions(monkeypatch, profile):
    whole = make_cache(200, 3)
    generator = torch.Generator().manual_seed(3)
    kept = [torch.rand(2, 200, generator=generator) < 0.5 for _ in whole.keys]
    cache = KVCache.from_tensors(whole.keys, whole.values, whole.meta, whole.token_ids, kept=kept)

    def size():
        info = inspect(encode(cache, profile))
        return sum(info.chunk_bytes(chunk, 2) for chunk in range(info.chunks))

    filled = size()
    monkeypatch.setattr(analysis, "FILL_STEPS", 0)
    assert filled < 0.95 * size()
