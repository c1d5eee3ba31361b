"""For authors of engines: the rules that every engine keeps, as tests. They need pytest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import link
from kvwire.types import KVCache

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.engines.base import Engine

__all__ = ["EngineConformance"]


class EngineConformance:
    """Tests of an engine; subclass it in a test module and give the fixture ``engine``.

    With ``pytest.register_assert_rewrite("kvwire.engines.testing")`` before the import, failures show both sides.

    Example:
        ::

            class TestMine(EngineConformance):
                @pytest.fixture(scope="class")
                def engine(self):
                    return MineEngine(small_random_model())  # a window of 160 tokens or more

    Attributes:
        tolerance: Greatest difference allowed, relative to the largest number of a tensor.
    """

    tolerance = 1e-5

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError("give the fixture `engine`: a small model with a window of 160 tokens or more")

    def test_documents_are_computed_alone_and_again_to_the_bit(self, engine: Engine) -> None:
        documents = [_ids(engine, seed, tokens) for seed, tokens in ((1, 29), (2, 12), (3, 1))]
        for cache, ids in zip(engine.prefill(documents), documents, strict=True):
            alone, again = engine.prefill([ids])[0], engine.prefill([ids])[0]
            assert _cache_error(cache, alone) < self.tolerance
            assert all(map(torch.equal, (*alone.keys, *alone.values), (*again.keys, *again.values)))
            assert (cache.token_ids, cache.meta.offset) == (tuple(ids), 0)
            assert cache.meta.shares_config(engine.meta)

    @pytest.mark.parametrize("offset", [0, 21])
    def test_extend_equals_the_tail_of_a_prefill(self, engine: Engine, offset: int) -> None:
        ids, cut = _ids(engine, 1, 29), 17
        whole = engine.extend(None, ids, offset=offset)
        assert whole.meta.offset == offset
        if not offset:
            assert _cache_error(whole, engine.prefill([ids])[0]) < self.tolerance
        tail = engine.extend(whole.slice(0, cut), ids[cut:])
        assert (tail.meta.offset, tail.token_ids) == (offset + cut, tuple(ids[cut:]))
        assert _cache_error(tail, whole.slice(cut, len(ids))) < self.tolerance
        ignorant = engine.extend(None, ids[cut:], offset=offset + cut)
        assert _cache_error(ignorant, whole.slice(cut, len(ids))) > 1e-2  # the prefix matters

    def test_moved_keys_are_what_the_model_computes_there(self, engine: Engine) -> None:
        first, second = _ids(engine, 1, 17), _ids(engine, 2, 12)
        linked = link(engine.prefill([first, second]))
        computed = engine.extend(None, second, offset=len(first))
        assert _cache_error(linked.slice(len(first), linked.tokens), computed) < 3 * self.tolerance

    def test_forward_goes_on_from_a_cache_and_leaves_it_as_it_was(self, engine: Engine) -> None:
        ids, question = _ids(engine, 1, 29), _ids(engine, 2, 7)
        (cache,) = engine.prefill([ids])
        before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
        wanted = engine.forward(None, ids + question, 0, logits=len(question))
        assert wanted.shape == (len(question), engine.vocabulary_size)
        assert not wanted.requires_grad
        past = engine.past_key_values(cache)
        parts = [engine.forward(past, question[:4], len(ids)), engine.forward(past, question[4:], len(ids) + 4)]
        assert _error(torch.cat(parts), wanted) < self.tolerance
        assert all(map(torch.equal, (*cache.keys, *cache.values), before))

    def test_what_cannot_be_run_is_refused(self, engine: Engine) -> None:
        for ids in ([], _ids(engine, 1, engine.window + 1)):
            with pytest.raises(ArgumentError):
                engine.prefill([ids])
            with pytest.raises(ArgumentError):
                engine.forward(None, ids, 0)
        with pytest.raises(ArgumentError):
            engine.extend(None, [3, 4], offset=engine.window - 1)

    def test_caches_that_it_cannot_hold_are_refused(self, engine: Engine) -> None:
        ids = _ids(engine, 1, 12)
        (cache,) = engine.prefill([ids])
        with pytest.raises(MismatchError):
            engine.past_key_values(replace(cache, meta=replace(cache.meta, model_revision="other")))
        drawn = torch.Generator().manual_seed(1)
        kept = [torch.rand(key.shape[:2], generator=drawn) < 0.5 for key in cache.keys]
        with pytest.raises(MismatchError):
            engine.past_key_values(KVCache.from_tensors(cache.keys, cache.values, cache.meta, ids, kept=kept))


def _ids(engine: Engine, seed: int, tokens: int) -> list[int]:
    """Token ids of a made-up document."""
    drawn = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, engine.vocabulary_size, (tokens,), generator=drawn)]


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _cache_error(ours: KVCache, theirs: KVCache) -> float:
    """Largest relative difference over all layers."""
    pairs = zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True)
    return max(_error(a, b) for a, b in pairs if b.numel())
