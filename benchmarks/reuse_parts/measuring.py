"""Every way of choosing rows on one prompt."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

import kvwire
from kvwire import link
from kvwire.reuse import RepairInput, repair_prompt, rows_for, selector_of
from kvwire.reuse.repair.selectors.cacheblend import CacheBlend
from kvwire.runtime.repair import by_token
from reuse_parts.prompts import DOCUMENTS, LENGTH, QUESTION, TOKENS, Judge, Prompt, copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire import KVCache, Profile, TransformersEngine
    from kvwire.reuse import Selector
    from kvwire.reuse.repair.selectors.base import Chosen
    from kvwire.runtime.prefill import Neighbours

SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.3)
MAIN = (0.05, 0.15)
"""Where every prompt is measured, the default at 30 % as well; the thorough ones at all shares."""
LEVEL_SHARES = (0.0, 0.05, 0.15, 0.3)
DEFAULT = "attention"
ON_LEVEL_0 = "attention, chosen on level 0"
RIVALS = ("cacheblend", "cacheblend, values", "lmcache", "first")
NONE = ("none", 0.0)
ALL = ("all", 1.0)


@dataclass(frozen=True)
class ChosenOn:
    """Rows that a selector chooses on another cache of the same prompt."""

    selector: Selector
    cache: KVCache
    name: str = ON_LEVEL_0

    @property
    def needs(self) -> frozenset[str]:
        """See ``Selector``."""
        return self.selector.needs

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``."""
        return self.selector.choose(replace(given, cache=self.cache), count)


@dataclass(frozen=True, eq=False)
class Figures:
    """One prompt's.

    Attributes:
        kl: By way and share.
        seconds: Of choosing and of computing, by way and share; in ``whole`` those of the prompt's other parts.
        coded: By level and share, where this was measured: repaired on top of that level.
        bits: For each element, of each level, headers left out.
    """

    kl: dict[tuple[str, float], float]
    seconds: dict[tuple[str, float], tuple[float, float]]
    whole: dict[str, float]
    coded: dict[tuple[str, float], float] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)


STORED = ("deviation", "product")
"""What needs deviations; they are measured on the prompts that are measured thoroughly."""


def costs(layers: int) -> dict[tuple[str, float], tuple[int, float, float]]:
    """Rows, token-layers and pairs, choosing included, by way and share."""
    out = {NONE: (0, 0.0, 0.0), ALL: _cost(selector_of("all"), 1.0, layers)}
    for name, selector in ways(None).items():
        for share in SHARES:
            out[name, share] = _cost(getattr(selector, "selector", selector), share, layers)
    return out


def _cost(selector: Selector, share: float, layers: int) -> tuple[int, float, float]:
    rows = rows_for(share, (LENGTH,) * DOCUMENTS)
    cost = selector.cost(TOKENS, rows, QUESTION, layers)
    return rows, cost.token_layers, cost.pairs


def ways(coarse: KVCache | None) -> dict[str, Selector | ChosenOn]:
    """All that choose, by name; ``coarse``: the prompt's cache at level 0."""
    found: dict[str, Selector | ChosenOn] = {
        name: selector_of(name) for name in (DEFAULT, "blend", "cacheblend", "lmcache", "first", "random", *STORED)
    }
    found["cacheblend, values"] = CacheBlend(sides="values")
    if coarse is not None:
        found[ON_LEVEL_0] = ChosenOn(found[DEFAULT], coarse)  # type: ignore[arg-type]
    return found


def measure(
    engine: TransformersEngine, profile: Profile, prompt: Prompt, around: Neighbours, *, thorough: bool
) -> Figures:
    """All ways on one prompt; thoroughly: at every share, and on top of every level."""
    levels = dict(levels_of(profile, prompt, all_of_them=thorough))
    stored = _stored(around, prompt) if thorough else None
    coarse, _ = next(iter(levels.values()))
    judge = Judge(engine, prompt)
    judge.add(*NONE, prompt.linked)
    seconds = {}
    for name, selector in ways(coarse).items():
        for share in _shares(name, thorough=thorough):
            cache = copy(prompt.linked)
            seconds[name, share] = _repair(engine, prompt, cache, (selector, stored), share)
            judge.add(name, share, cache)
    if thorough:
        cache = copy(prompt.linked)
        seconds[ALL] = _repair(engine, prompt, cache, (selector_of("all"), None), 1.0)
        judge.add(*ALL, cache)
    judge.finish()
    coded = _coded(engine, prompt, levels) if thorough else {}
    bits = {level: size for level, (_, size) in levels.items()} if thorough else {}
    return Figures(judge.kl, seconds, prompt.seconds, coded, bits)


def _shares(name: str, *, thorough: bool) -> tuple[float, ...]:
    if thorough:
        return SHARES
    if name in {"blend", "random", "cacheblend, values", *STORED}:
        return ()
    return (*MAIN, 0.3) if name == DEFAULT else MAIN


def _stored(around: Neighbours, prompt: Prompt) -> torch.Tensor | None:
    """Deviations as blobs would hold them, float32 ``[tokens]``."""
    starts = range(0, TOKENS, LENGTH)
    pairs = zip(prompt.alone, starts, strict=True)
    records = [around.measure(cache, prompt.text[start : start + LENGTH]) for cache, start in pairs]
    return by_token([(LENGTH, record) for record in records])


def _repair(
    engine: TransformersEngine,
    prompt: Prompt,
    cache: KVCache,
    how: tuple[Selector | ChosenOn, torch.Tensor | None],
    share: float,
) -> tuple[float, float]:
    selector, stored = how
    given = RepairInput(engine, cache, prompt.text, (LENGTH,) * DOCUMENTS, prompt.question, stored)
    if isinstance(selector, ChosenOn):
        engine.update_rows(cache, prompt.text, selector.choose(given, rows_for(share, given.documents)).rows)
        return 0.0, 0.0
    done = repair_prompt(given, selector, share)
    return done.select_s, done.compute_s


def levels_of(profile: Profile, prompt: Prompt, *, all_of_them: bool) -> Iterator[tuple[str, tuple[KVCache, float]]]:
    """The prompt linked from each level of its documents, coarsest first, and that level's bits for each element."""
    blobs = [kvwire.encode(cache, profile) for cache in prompt.alone]
    infos = [kvwire.inspect(blob) for blob in blobs]
    for index, level in enumerate(infos[0].levels if all_of_them else infos[0].levels[:1]):
        decoded = [kvwire.decode(blob, index, profile, dtype=torch.float32) for blob in blobs]
        elements = LENGTH * prompt.linked.meta.elements_per_token
        sizes = [8 * (info.levels[index].cumulative_bytes - info.header_bytes) / elements for info in infos]
        yield level.name, (link(decoded), statistics.fmean(sizes))


def _coded(
    engine: TransformersEngine, prompt: Prompt, levels: dict[str, tuple[KVCache, float]]
) -> dict[tuple[str, float], float]:
    judge = Judge(engine, prompt)
    for level, (linked, _) in levels.items():
        for share in LEVEL_SHARES:
            cache = copy(linked)
            _repair(engine, prompt, cache, (selector_of(DEFAULT), None), share)
            judge.add(level, share, cache)
    judge.finish()
    return judge.kl
