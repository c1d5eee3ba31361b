"""Measuring what this machine needs for prefill and for decoding, so that the controller plans with facts."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvwire.codec import BlobDecoder, Profile, at_hand, encode
from kvwire.codec.workers import one_core
from kvwire.controller import CostModel, fit_decode, fit_joined, fit_prefill
from kvwire.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.codec import AnyProfile, Backend
    from kvwire.controller import PrefillCost
    from kvwire.engines.base import Engine
    from kvwire.types import KVCache

_log = logging.getLogger(__name__)
_PASSES = ((32, 0), (256, 0), (1024, 0), (256, 768), (32, 2048))
"""(new tokens, tokens before them): enough to tell fixed cost, cost of a token and cost of attention apart."""
_JOINED = ((2, 16, 0), (8, 16, 0), (2, 96, 0), (2, 32, 768))
"""(rows, new tokens of each, tokens before them): likewise, for passes that are joined."""
_TOKENS = 256
_QUESTION = 32
_REPEATS = 3


def measure_costs(engine: Engine, profile: AnyProfile | None = None, backend: Backend = "auto") -> CostModel:
    """Time a few forward passes and chunk decodings on this engine; takes a second or two, and warms both up.

    The model's cache content is real, its text is random.

    Args:
        engine: The model to time.
        profile: What decoding is timed with; None for the identity transform.
        backend: Which kernels decode.

    Returns:
        Costs of prefill, of decoding, and of handing the cache over, in seconds.
    """
    longest = min(engine.window, max(new + before for new, before in _PASSES))
    ids = _random_ids(engine, longest)
    passes = [(new, before) for new, before in _PASSES if new + before <= longest] or [(longest, 0)]
    prefill = fit_prefill([(new, before, _prefill_s(engine, ids, new, before)) for new, before in passes])
    decode = fit_decode(_decode_samples(engine, ids, profile, backend))
    return CostModel(prefill, decode, link_s_per_token=_link_s(engine, ids, prefill), joined=measure_joined(engine))


def measure_joined(engine: Engine) -> PrefillCost | None:
    """Time a few passes over rows of several caches on this engine, which warms them up.

    Args:
        engine: The model to time.

    Returns:
        What such a pass costs in all its rows; None where the engine extends caches one by one.
    """
    if not joins(engine):
        return None
    fitting = [(rows, new, before) for rows, new, before in _JOINED if new + before <= engine.window]
    samples = [(*rows, _joined_s(engine, *rows)) for rows in fitting]
    return fit_joined(samples) if samples else None


def joins(engine: Engine) -> bool:
    """Whether an engine extends several caches in one pass; the log says why not.

    Args:
        engine: The engine.
    """
    try:
        engine.check_together()
    except MismatchError as error:
        _log.info("what several loads recompute is computed for one after the other: %s", error)
        return False
    return True


def _joined_s(engine: Engine, rows: int, new: int, before: int) -> float:
    ids = _random_ids(engine, before + new)
    prefix = engine.extend(None, ids[:before]) if before else None
    prefixes, news = [prefix] * rows, [ids[before:]] * rows
    return _best(lambda: engine.extend_together(prefixes, news, offsets=[0] * rows), engine)


def warm_up(engine: Engine, profile: AnyProfile | None = None, backend: Backend = "auto") -> None:
    """Do a little of everything once, so that no load waits for kernels and libraries; for costs that are known.

    Args:
        engine: The model to warm up.
        profile: What decoding is done with; None for the identity transform.
        backend: Which kernels decode.
    """
    ids = _random_ids(engine, min(engine.window, 2 * _QUESTION))
    (cache,) = engine.prefill([ids])
    engine.extend(cache.slice(0, len(ids) - 1), ids[-1:])
    decoder, blob = _coded(engine, cache, ids, profile, backend)
    level = len(decoder.info.levels) - 1
    decoder.decode_chunk(0, [blob[segment.offset : segment.end] for segment in decoder.info.reads(0, level)], level)
    engine.forward(engine.past_key_values(cache.slice(0, len(ids) - 1)), ids[-1:], len(ids) - 1, logits=1)


def warm_up_decoding(engine: Engine) -> None:
    """Decode a little, so that no load waits for kernels and libraries; no model is run and no profile is needed.

    Args:
        engine: Whose cache layout, dtype and memory are used.
    """
    cache = engine.allocate(_QUESTION)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(0))
    blob = encode(cache)
    decoder = BlobDecoder(blob, out=cache)
    for level in (0, len(decoder.info.levels) - 1):
        decoder.decode_chunk(0, [blob[segment.offset : segment.end] for segment in decoder.info.reads(0, level)], level)


def _random_ids(engine: Engine, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, engine.vocabulary_size, (count,), generator=generator).tolist()


def _coded(
    engine: Engine, part: KVCache, ids: list[int], profile: AnyProfile | None, backend: Backend
) -> tuple[BlobDecoder, bytes]:
    """A cache as a blob, and what decodes it into this engine's memory."""
    if isinstance(profile, Profile):
        profile = at_hand(profile)
    layers = profile.prefix_layers if isinstance(profile, Profile) else 0
    hidden = engine.prefix_states(ids[: part.tokens], layers) if layers else None
    blob = encode(part, profile, hidden=hidden, backend=backend)
    out = engine.allocate(part.tokens + 1).slice(0, part.tokens)  # a part of a prompt, as in loads
    return BlobDecoder(blob, profile, out=out, hidden=hidden, backend=backend), blob


def _link_s(engine: Engine, ids: list[int], prefill: PrefillCost) -> float:
    """Seconds for each prompt token that handing the cache over costs, beyond the question's pass itself."""
    before = len(ids) - _QUESTION
    if before < 1:
        return 0.0
    (cache,) = engine.prefill([ids[:before]])
    closing = _best(lambda: engine.forward(engine.past_key_values(cache), ids[before:], before, logits=1), engine)
    return max(0.0, closing - prefill.seconds(_QUESTION, before)) / before


def _prefill_s(engine: Engine, ids: list[int], new: int, before: int) -> float:
    prefix = engine.extend(None, ids[:before]) if before else None
    return _best(lambda: engine.extend(prefix, ids[before : before + new]), engine)


def _decode_samples(
    engine: Engine, ids: list[int], profile: AnyProfile | None, backend: Backend
) -> list[tuple[int, int, float]]:
    samples = []
    (cache,) = engine.prefill([ids[:_TOKENS]])
    for tokens in (min(64, cache.tokens), cache.tokens):
        part = cache.slice(0, tokens)
        decoder, blob = _coded(engine, part, ids, profile, backend)
        info = decoder.info
        for level in (0, len(info.levels) - 1):
            pieces = [blob[segment.offset : segment.end] for segment in info.reads(0, level)]
            with nullcontext() if decoder.on_gpu else one_core():  # as loads do, chunks side by side
                seconds = _best(partial(decoder.decode_chunk, 0, pieces, level), engine)
            samples.append((tokens, sum(map(len, pieces)), seconds))
    return samples


def _best(work: Callable[[], object], engine: Engine) -> float:
    """Quickest of a few runs after one that warms up: other work on the machine only ever adds."""
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        work()
        engine.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
