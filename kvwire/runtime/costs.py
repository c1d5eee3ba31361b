"""Measuring what this machine needs for prefill and for decoding, so that the controller plans with facts."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvwire.codec import BlobDecoder, Profile, at_hand, encode
from kvwire.codec.workers import stay_on_one_core
from kvwire.controller import CostModel, fit_decode, fit_joined, fit_prefill
from kvwire.errors import MismatchError
from kvwire.reuse import LinkedPrompt
from kvwire.runtime.threads import usual_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.codec import AnyProfile, Backend
    from kvwire.controller import PrefillCost
    from kvwire.engines.base import Engine
    from kvwire.types import KVCache

_log = logging.getLogger(__name__)
_PASSES = ((32, 0), (256, 0), (1024, 0), (256, 768), (32, 2048))
"""(new tokens, tokens before them): enough to tell fixed cost, cost of a token and cost of attention apart."""
_JOINED = ((2, 16, 0), (8, 16, 0), (2, 96, 0), (2, 32, 768))
"""(rows, new tokens of each, tokens before them): likewise, for passes that are joined."""
_CHUNKS = (64, 256)
_QUESTION = 32
_REPEATS = 3
_ENOUGH_S = 0.25
"""Runs that took so long are enough: the start of a process waits for them."""


def measure_costs(
    engine: Engine, profile: AnyProfile | None = None, backend: Backend = "auto", threads: int | None = None
) -> CostModel:
    """Time a few forward passes and chunk decodings on this engine, which warms both up.

    That takes a second or two, and on a slow processor ten. The model's cache content is real, its text is random.

    Args:
        engine: The model to time.
        profile: What decoding is timed with; None for the identity transform.
        backend: Which kernels decode.
        threads: Chunks that the processor decodes side by side, which slow each other down; None: as many as loads do.

    Returns:
        Costs of prefill, of decoding, and of handing the cache over, in seconds.
    """
    longest = min(engine.window, max(new + before for new, before in _PASSES))
    ids = _random_ids(engine, longest)
    passes = [(new, before) for new, before in _PASSES if new + before <= longest] or [(longest, 0)]
    (cache,) = engine.prefill([ids[: max(1, longest - _QUESTION)]])
    prefill = fit_prefill([(*each, _prefill_s(engine, cache, ids, *each)) for each in passes])
    decode = fit_decode(_decode_samples(engine, cache, ids, profile, backend, usual_threads(threads)))
    return CostModel(
        prefill, decode, link_s_per_token=_link_s(engine, cache, ids, prefill), joined=measure_joined(engine, cache)
    )


def measure_joined(engine: Engine, cache: KVCache | None = None) -> PrefillCost | None:
    """Time a few passes over rows of several caches on this engine, which warms them up.

    Args:
        engine: The model to time.
        cache: One of the model's, as long as the window or 768 tokens; None: it is computed.

    Returns:
        What such a pass costs in all its rows; None where the engine extends caches one by one.
    """
    if not joins(engine):
        return None
    fitting = [(rows, new, before) for rows, new, before in _JOINED if new + before <= engine.window]
    if cache is None:
        (cache,) = engine.prefill([_random_ids(engine, max((before for *_, before in fitting), default=0) or 1)])
    samples = [(*rows, _joined_s(engine, cache, *rows)) for rows in fitting]
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


def _joined_s(engine: Engine, cache: KVCache, rows: int, new: int, before: int) -> float:
    prefix = cache.slice(0, before) if before else None
    prefixes, news = [prefix] * rows, [_random_ids(engine, new)] * rows
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
    blob, make_decoder = _encoded(engine, cache, ids, profile, backend)
    decoder = make_decoder()
    _decoding(decoder, blob, len(decoder.info.levels) - 1)()
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
        _decoding(decoder, blob, level)()


def _random_ids(engine: Engine, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, engine.vocabulary_size, (count,), generator=generator).tolist()


def _encoded(
    engine: Engine, part: KVCache, ids: list[int], profile: AnyProfile | None, backend: Backend
) -> tuple[bytes, Callable[[], BlobDecoder]]:
    """A cache as a blob, and what makes decoders of it, each into memory of its own."""
    if isinstance(profile, Profile):
        profile = at_hand(profile)
    layers = profile.prefix_layers if isinstance(profile, Profile) else 0
    hidden = engine.prefix_states(ids[: part.tokens], layers) if layers else None
    blob = encode(part, profile, hidden=hidden, backend=backend)

    def make_decoder() -> BlobDecoder:
        out = engine.allocate(part.tokens + 1).slice(0, part.tokens)  # a part of a prompt, as in loads
        return BlobDecoder(blob, profile, out=out, hidden=hidden, backend=backend)

    return blob, make_decoder


def _decoding(decoder: BlobDecoder, blob: bytes, level: int) -> Callable[[], None]:
    """The decoding of a blob's only chunk."""
    pieces = [blob[segment.offset : segment.end] for segment in decoder.info.reads(0, level)]
    return partial(decoder.decode_chunk, 0, pieces, level)


def _link_s(engine: Engine, cache: KVCache, ids: list[int], prefill: PrefillCost) -> float:
    """Seconds for each prompt token that handing the cache over costs, beyond the question's pass itself."""
    before = cache.tokens
    new = len(ids) - before
    if not new:
        return 0.0
    room = engine.allocate(len(ids))  # as loads have it
    prompt = LinkedPrompt([before], engine.meta, cache=room.slice(0, before))
    prompt.write(0, 0, cache)
    closing = _best(
        lambda: engine.forward(engine.growing_past(prompt.cache, room), ids[before:], before, logits=1), engine
    )
    return max(0.0, closing - prefill.seconds(new, before)) / before


def _prefill_s(engine: Engine, cache: KVCache, ids: list[int], new: int, before: int) -> float:
    prefix = cache.slice(0, before) if before else None
    return _best(lambda: engine.extend(prefix, ids[before : before + new]), engine)


def _decode_samples(
    engine: Engine, cache: KVCache, ids: list[int], profile: AnyProfile | None, backend: Backend, threads: int
) -> list[tuple[int, int, float]]:
    """Tokens, bytes and seconds of a short chunk and, where the window is long enough, a long one at each level."""
    samples = []
    with ThreadPoolExecutor(threads, initializer=stay_on_one_core) as pool:
        for tokens in sorted({min(each, cache.tokens) for each in _CHUNKS}):
            blob, make_decoder = _encoded(engine, cache.slice(0, tokens), ids, profile, backend)
            decoders = [make_decoder()]
            decoders += [] if decoders[0].on_gpu else [make_decoder() for _ in range(threads - 1)]
            info = decoders[0].info
            for level in range(len(info.levels)):
                works = [_decoding(each, blob, level) for each in decoders]
                seconds = _best(works[0] if decoders[0].on_gpu else partial(_side_by_side, pool, works), engine)
                samples.append((tokens, sum(segment.stored for segment in info.reads(0, level)), seconds))
    return samples


def _side_by_side(pool: ThreadPoolExecutor, works: Sequence[Callable[[], None]]) -> None:
    """Decode in threads, as loads do: each slows the others down."""
    for running in [pool.submit(work) for work in works]:
        running.result()


def _best(work: Callable[[], object], engine: Engine) -> float:
    """Quickest of a few runs after one that warms up: other work on the machine only ever adds."""
    work()
    engine.synchronize()
    times: list[float] = []
    while not times or (len(times) < _REPEATS and sum(times) < _ENOUGH_S):
        started = time.perf_counter()
        work()
        engine.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)
