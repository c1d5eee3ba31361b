"""Measuring what edited caches lose: answers about the very words that differ from the donor's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError
from kvwire.reuse import LinkedPrompt, RepairInput, align, compute_holes, place_spans, repair_prompt, selector_of
from kvwire.runtime.prefill import opened, prefill_documents
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.reports import EDIT_BOUND, MEASURED_SELECTORS, EditReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvwire.engines.base import Engine
    from kvwire.reuse import EditScript
    from kvwire.types import KVCache

TOKENS, QUESTION_TOKENS, LONGEST_EDIT = 384, 16, 6
"""Of a prompt, of what repeats the words before an edit, and of an edit."""
_LEAST_TOKENS = 64
EDITED = (0.02, 0.05, 0.1, 0.2)
SHARES = (0.05, 0.15, 0.3)


@dataclass(frozen=True)
class EditPrompt:
    """A prompt, a donor that differs from it in some runs of tokens, and what follows, which one of these decides.

    Attributes:
        text: Token ids of the prompt.
        donor: Of the donor.
        question: The words that stand before one of the runs in both.
        value: The run, as the prompt has it.
    """

    text: tuple[int, ...]
    donor: tuple[int, ...]
    question: tuple[int, ...]
    value: tuple[int, ...]


def edit_prompts(
    texts: Sequence[Sequence[int]], count: int, share: float, window: int, *, seed: int = 0
) -> list[EditPrompt]:
    """Cut prompts from texts, and make a donor of each: runs of a share of its tokens come from elsewhere."""
    size = min(TOKENS, window - QUESTION_TOKENS - LONGEST_EDIT, max(map(len, texts), default=0))
    places = [(which, at) for which, ids in enumerate(texts) for at in range(0, len(ids) - size + 1, size)]
    if size < _LEAST_TOKENS or not places:
        raise ArgumentError(f"edits are measured on texts of at least {_LEAST_TOKENS} tokens; give a longer one")
    pool = [token for ids in texts for token in ids]
    chosen = random.Random(seed).sample(places, min(count, len(places)))  # noqa: S311 - a choice of texts
    return [_edited(texts[which][at : at + size], pool, share, f"{seed} {which} {at}") for which, at in chosen]


def _edited(text: Sequence[int], pool: Sequence[int], share: float, seed: str) -> EditPrompt:
    generator = random.Random(seed)  # noqa: S311 - a choice of edits
    runs: list[tuple[int, int]] = []
    step = max(LONGEST_EDIT + 1, int(LONGEST_EDIT / 2 / share))
    for start in range(QUESTION_TOKENS, len(text) - LONGEST_EDIT, step):
        at = start + generator.randrange(max(1, min(step, len(text) - start) - LONGEST_EDIT))
        runs.append((at, at + generator.randint(1, min(LONGEST_EDIT, len(text) - at))))
    donor, end = list[int](), 0
    for at, stop in runs:
        other = generator.randrange(len(pool) - LONGEST_EDIT)
        donor += [*text[end:at], *pool[other : other + generator.randint(1, LONGEST_EDIT)]]
        end = stop
    at, stop = generator.choice(runs[: max(1, len(runs) * 3 // 4)])
    donor += text[end:]
    return EditPrompt(tuple(text), tuple(donor), tuple(text[at - QUESTION_TOKENS : at]), tuple(text[at:stop]))


def check_edits(
    engine: Engine, texts: Sequence[Sequence[int]], count: int = 12, *, bound: float = EDIT_BOUND, seed: int = 0,
    tell: Callable[[int], object] = lambda _: None,
) -> EditReport:  # fmt: skip
    """Measure edits: the donor's own cache, holes alone, and every selector, by share of tokens that differ."""
    rows: dict[object, list[float]] = {}
    done = 0
    for share in EDITED:
        found: dict[object, list[float]] = {}
        for prompt in edit_prompts(texts, count, share, engine.window - len(engine.opening_tokens), seed=seed):
            for name, kl in _measured(engine, prompt).items():
                found.setdefault(name, []).append(max(0.0, kl))
            done += 1
            tell(done)
        for name, each in found.items():
            rows.setdefault(name, []).append(fmean(each))
    repaired = {name: tuple(tuple(rows[name, share]) for share in SHARES) for name in MEASURED_SELECTORS}
    holes = tuple(rows["holes"])
    return EditReport(
        engine.meta.model_id, done // len(EDITED), EDITED, tuple(rows["donor"]), holes, SHARES, repaired, bound
    )


def _measured(engine: Engine, prompt: EditPrompt) -> dict[object, float]:
    """KL divergences of the value from a full prefill."""
    opening, script = engine.opening_tokens, align([prompt.donor], prompt.text)
    (whole,) = engine.prefill([opened(engine, prompt.text)])
    (donor,) = prefill_documents(engine, [prompt.donor])
    wanted = _logits(engine, whole, prompt)
    (stale,) = engine.prefill([opened(engine, prompt.donor)])
    edited = edit(engine, donor, prompt.text, script)
    found: dict[object, float] = {
        "donor": mean_kl(wanted, _logits(engine, stale, prompt)),
        "holes": mean_kl(wanted, _logits(engine, edited, prompt)),
    }
    front, ids = max(1, len(opening) + script.front), (*opening, *prompt.text)
    for name in MEASURED_SELECTORS:
        for share in SHARES:
            kl = found["holes"]
            if front < len(ids):
                cache = copied(engine, edited)
                given = RepairInput(engine, cache, ids, (front, len(ids) - front), prompt.question)
                repair_prompt(given, selector_of(name), share)
                kl = mean_kl(wanted, _logits(engine, cache, prompt))
            found[name, share] = kl
    return found


def edit(engine: Engine, donor: KVCache, token_ids: Sequence[int], script: EditScript) -> KVCache:
    """A prompt's cache, made of one donor's, with holes computed."""
    opening = engine.opening_tokens
    room = engine.allocate(len(opening) + len(token_ids))
    prompt = LinkedPrompt([len(token_ids)], engine.meta, cache=room, opening=opening)
    if opening:
        prompt.write_opening(engine.prefill([opening])[0])
    compute_holes(engine, prompt, (*opening, *token_ids), place_spans(prompt, [donor], script))
    return prompt.cache


def copied(engine: Engine, cache: KVCache) -> KVCache:
    """A cache of its own with the same rows."""
    made = engine.allocate(cache.tokens)
    for ours, theirs in zip((*made.keys, *made.values), (*cache.keys, *cache.values), strict=True):
        ours.copy_(theirs)
    return made


def _logits(engine: Engine, cache: KVCache, prompt: EditPrompt) -> Tensor:
    """Of each token of the value."""
    behind = [*prompt.question, *prompt.value[:-1]]
    with torch.no_grad():
        return (
            engine.forward(engine.past_key_values(cache), behind, cache.tokens, logits=len(prompt.value)).float().cpu()
        )
