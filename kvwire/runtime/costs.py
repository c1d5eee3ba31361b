"""Measures this machine's costs of prefill and decoding, for the controller."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from kvwire.codec import BlobDecoder, Profile, encode, loaded_part, trial_blob
from kvwire.codec.workers import stay_on_one_core
from kvwire.controller import CostModel, PrefillCost, fit_decode, fit_joined, fit_prefill
from kvwire.errors import MismatchError
from kvwire.reuse import LinkedPrompt
from kvwire.runtime.threads import usual_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.codec import AnyProfile, Backend
    from kvwire.engines.base import Engine
    from kvwire.types import KVCache

_progress = logging.getLogger("kvwire.progress")
_log = logging.getLogger(__name__)
BUDGET_S = 1.0
"""Approximate seconds of measuring, for which the start of a process waits."""
_SHARES = {"prefill": 0.45, "decode": 0.35, "link": 0.1, "joined": 0.1}
_PASSES = ((32, 0), (32, 2048), (128, 0), (256, 0), (256, 768), (1024, 0))
"""(new tokens, tokens before them): enough to separate fixed cost, cost per token and cost of attention. Shorter passes
only show the cost of reading the weights."""
_JOINED = ((2, 16, 0), (2, 32, 768), (8, 16, 0), (2, 96, 0))
"""(rows, new tokens per row, tokens before them): the same for joined passes."""
_CHUNKS = (16, 64, 256)
_QUESTION = 32
_WARM_TOKENS = 16
_FAR = 16
_REPEATS = 3
_TERMS = 3
"""With fewer samples a cost is taken as proportional."""
_ENDS = 2
"""Levels of each chunk that are always timed, coarsest and finest: they show the cost of a byte."""
_ENOUGH = 0.1
"""A run that takes more than this share of the remaining budget is not repeated."""


def measure_costs(
    engine: Engine,
    profile: AnyProfile | None = None,
    backend: Backend = "auto",
    threads: int | None = None,
) -> CostModel:
    """Time a few forward passes and chunk decodings on this engine, which also warms it up.

    Short passes and chunks come first, longer ones as the budget allows; the rest is extrapolated. Contents are random:
    they cost the same as real ones.
    """
    started = time.perf_counter()
    longest = min(engine.window, max(new + before for new, before in _PASSES))
    ids = _random_ids(engine, longest)
    cache = _random_cache(engine, max(1, longest - _QUESTION), ids)
    prefill = _measure_prefill(engine, cache, ids, _until("prefill"))
    samples = _decode_samples(engine, cache, profile, backend, usual_threads(threads), _until("decode"))
    link_s = _link_s(engine, cache, ids, prefill, _until("link"))
    joined = measure_joined(engine, cache, _until("joined"))
    costs = CostModel(prefill, fit_decode(samples), link_s_per_token=link_s, joined=joined)
    taken, chunk = time.perf_counter() - started, max(_CHUNKS)
    rate = chunk / max(costs.prefill.seconds(chunk), 1e-9)
    _progress.info("measured this engine in %.1f s: about %.0f tokens of prefill a second", taken, rate)
    return costs


def _until(part: str) -> float:
    """When the time for a part's samples ends, of which the first is always taken."""
    return time.perf_counter() + _SHARES[part] * BUDGET_S


def _left_s(until: float) -> float:
    """Seconds left, below 0 if overspent."""
    return until - time.perf_counter()


def measure_joined(engine: Engine, cache: KVCache, until: float) -> PrefillCost | None:
    """Time a few joined passes over several caches, which also warms them up."""
    if not joins(engine):
        return None
    fitting = [(rows, new, before) for rows, new, before in _JOINED if new + before <= engine.window]
    samples: list[tuple[int, int, int, float]] = []
    for rows, new, before in fitting:
        if samples and samples[-1][-1] * rows * new / (samples[-1][0] * samples[-1][1]) > _left_s(until):
            break
        prefixes, news = [cache.slice(0, before) if before else None] * rows, [_random_ids(engine, new)] * rows
        work = partial(engine.extend_together, prefixes, news, offsets=[0] * rows)
        samples.append((rows, new, before, _best(work, engine, until)))
    if len(samples) == 1:
        count, new, _, seconds = samples[0]
        return PrefillCost(0.0, seconds / (count * new))
    return fit_joined(samples) if samples else None


def joins(engine: Engine) -> bool:
    """Whether an engine extends several caches in one pass; the log says why not."""
    try:
        engine.check_together()
    except MismatchError as error:
        _log.info("chunks of several loads are recomputed one load at a time: %s", error)
        return False
    return True


def warm_up(engine: Engine, profile: AnyProfile | None = None, backend: Backend = "auto") -> None:
    """Run a little of everything once, so that no load waits for kernels and libraries; if costs are known."""
    ids = _random_ids(engine, min(engine.window, _WARM_TOKENS))
    cache = _random_cache(engine, len(ids), ids)
    engine.extend(cache.slice(0, len(ids) - 1), ids[-1:])
    blob, make_decoder = _trial(engine, cache, profile, backend)
    decoder = make_decoder()
    _decoding(decoder, blob, len(decoder.info.levels) - 1)()
    engine.forward(engine.past_key_values(cache.slice(0, len(ids) - 1)), ids[-1:], len(ids) - 1, logits=1)


def warm_up_decoding(engine: Engine) -> None:
    """Decode a little, so that no load waits for kernels and libraries; needs no model and no profile."""
    cache = _random_cache(engine, _QUESTION)
    blob = encode(cache)
    decoder = BlobDecoder(blob, out=cache)
    for level in (0, len(decoder.info.levels) - 1):
        _decoding(decoder, blob, level)()


def _random_ids(engine: Engine, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, engine.vocabulary_size, (count,), generator=generator).tolist()


def _random_cache(engine: Engine, tokens: int, ids: list[int] | None = None) -> KVCache:
    """A random cache in the engine's memory: passes on top of it take as long as on a real one."""
    cache = engine.allocate(tokens)
    if ids is not None:
        cache = replace(cache, token_ids=tuple(ids[:tokens]))
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(0))
    return cache


def _trial(
    engine: Engine, part: KVCache, profile: AnyProfile | None, backend: Backend
) -> tuple[bytes, Callable[[], BlobDecoder]]:
    """A blob to decode, and a factory of decoders, each into its own memory."""
    if isinstance(profile, Profile):
        profile = loaded_part(profile)
    layers, ids = profile.prefix_layers if isinstance(profile, Profile) else 0, list(part.token_ids or ())
    hidden = engine.prefix_states(ids, layers) if layers else None
    blob = trial_blob(part, profile, hidden=hidden)

    def make_decoder() -> BlobDecoder:
        out = engine.allocate(part.tokens + 1).slice(0, part.tokens)  # a part of a prompt, as in loads
        return BlobDecoder(blob, profile, out=out, hidden=hidden, backend=backend, rounded=True)

    return blob, make_decoder


def _decoding(decoder: BlobDecoder, blob: bytes, level: int) -> Callable[[], None]:
    """A job that decodes a blob's only chunk."""
    pieces = [blob[segment.offset : segment.end] for segment in decoder.info.reads(0, level)]
    return partial(decoder.decode_chunk, 0, pieces, level)


def _link_s(engine: Engine, cache: KVCache, ids: list[int], prefill: PrefillCost, until: float) -> float:
    """Seconds per prompt token for handing the cache over, without the question's pass."""
    before = cache.tokens
    new = len(ids) - before
    if not new or prefill.seconds(new, before) > _left_s(until):
        return 0.0
    room = engine.allocate(len(ids))  # as in loads
    prompt = LinkedPrompt([before], engine.meta, cache=room.slice(0, before))
    prompt.write(0, 0, cache)

    def close() -> None:
        engine.forward(engine.growing_past(prompt.cache, room), ids[before:], before, logits=1)

    closing = _best(close, engine, until)
    return max(0.0, closing - prefill.seconds(new, before)) / before


def _measure_prefill(engine: Engine, cache: KVCache, ids: list[int], until: float) -> PrefillCost:
    """Costs of passes, from as many as there is time for."""
    longest, samples = len(ids), list[tuple[int, int, float]]()
    engine.extend(None, ids[:1])  # warms up, in case that takes long
    known: PrefillCost | None = None
    for new, before in [each for each in _PASSES if sum(each) <= longest] or [(longest, 0)]:
        if known is not None and known.seconds(new, before) > _left_s(until):
            continue
        prefix = cache.slice(0, before) if before else None
        samples.append((new, before, _best(partial(engine.extend, prefix, ids[before : before + new]), engine, until)))
        known = fit_prefill(samples) if len(samples) >= _TERMS else PrefillCost(0.0, samples[-1][-1] / new)
    return cast("PrefillCost", known)


def _decode_samples(
    engine: Engine, cache: KVCache, profile: AnyProfile | None, backend: Backend, threads: int, until: float
) -> list[tuple[int, int, float]]:
    """Tokens, bytes and seconds of chunks, short ones first: each at the coarsest level, the finest, and others."""
    samples: list[tuple[int, int, float]] = []
    with ThreadPoolExecutor(threads, initializer=stay_on_one_core) as pool:
        spent = 0.0
        for tokens in sorted({min(each, cache.tokens) for each in _CHUNKS}):
            if samples and spent * tokens / samples[-1][0] > _left_s(until):
                break
            before_s = _left_s(until)
            blob, make_decoder = _trial(engine, cache.slice(0, tokens), profile, backend)
            decoders = [make_decoder()]
            decoders += [] if decoders[0].on_gpu else [make_decoder() for _ in range(threads - 1)]
            info = decoders[0].info
            finest = len(info.levels) - 1
            levels = [0, finest, *range(1, finest)] if finest else [0]
            for number, level in enumerate(levels):
                if number >= _ENDS and _left_s(until) < 0:
                    break
                works = [_decoding(each, blob, level) for each in decoders]
                work = works[0] if decoders[0].on_gpu else partial(_side_by_side, pool, works)
                stored = sum(segment.stored for segment in info.reads(0, level))
                samples.append((tokens, stored, _best(work, engine, until)))
            spent = before_s - _left_s(until)
    if len({tokens for tokens, *_ in samples}) == 1:  # one length cannot show a fixed cost
        samples += [(_FAR * tokens, _FAR * stored, _FAR * seconds) for tokens, stored, seconds in samples]
    return samples


def _side_by_side(pool: ThreadPoolExecutor, works: Sequence[Callable[[], None]]) -> None:
    """Decode in threads, as in loads, where they slow each other down."""
    for running in [pool.submit(work) for work in works]:
        running.result()


def _best(work: Callable[[], object], engine: Engine, until: float) -> float:
    """Fastest of a few runs after a warm-up: other work on the machine only ever adds.

    If the first run takes a good part of the budget, it counts.
    """
    times: list[float] = []
    while len(times) <= _REPEATS:
        left, started = _left_s(until), time.perf_counter()
        work()
        engine.synchronize()
        times.append(time.perf_counter() - started)
        if times[-1] > _ENOUGH * left:
            break
    return min(times)
