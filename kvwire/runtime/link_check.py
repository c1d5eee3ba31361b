"""Measures a model's loss from linking documents, the effect of repair, and whether linking is exact at all."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch

from kvwire.codec import Profile, decode, encode, inspect
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import RepairInput, ShiftLearner, block_mask, link, repair_prompt, selector_of
from kvwire.runtime.prefill import compute_documents, link_opened, prefill_documents, states_of
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.reports import DEFAULT_SELECTOR, GAIN_SHARE, MEASURED_SELECTORS, LinkReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkShift
    from kvwire.types import KVCache

PIECES, PIECE_TOKENS, QUESTION_TOKENS, REST_TOKENS = 6, 128, 16, 16
"""For prompts cut from texts: number of documents, their tokens, the question's, and those after it."""
_LEAST_PIECE = 16
SHARES = (0.02, 0.05, 0.15, 0.3)
_LEVEL_SHARE = 0.15
_LEVEL_PROMPTS = 4
_EXACT = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference of logits, relative to their spread, between equal computations."""
_EXACT_HALF = 0.1


@dataclass(frozen=True)
class CheckPrompt:
    """A prompt to measure on."""

    documents: tuple[tuple[int, ...], ...]  # token ids of each
    question: tuple[int, ...]  # token ids of the question
    rest: tuple[int, ...]  # token ids after it: the answer, or the text's continuation

    @property
    def text(self) -> list[int]:
        """Token ids of all documents."""
        return [token for ids in self.documents for token in ids]


def prompts_of(texts: Sequence[Sequence[int]], count: int, window: int, *, seed: int = 0) -> list[CheckPrompt]:
    """Cut prompts from texts: each is a stretch of one text in pieces, so that every piece needs those before it."""
    return split_prompts(texts, count, 0, window, seed=seed)[0]


def split_prompts(
    texts: Sequence[Sequence[int]], count: int, learning: int, window: int, *, seed: int = 0
) -> tuple[list[CheckPrompt], list[CheckPrompt]]:
    """``prompts_of`` texts, and further prompts without common tokens."""
    places, piece = _places(texts, window)
    judged = _chosen(places, count, seed)
    reach = PIECES * piece + QUESTION_TOKENS + REST_TOKENS
    taken: dict[int, list[int]] = {}
    for which, start in judged:
        taken.setdefault(which, []).append(start)
    free = [
        (which, start) for which, start in places
        if all(abs(start - other) >= reach for other in taken.get(which, ()))
    ]  # fmt: skip
    others = _chosen(free, learning, seed + 1)
    first, second = ([_cut(texts[which], start, piece) for which, start in each] for each in (judged, others))
    return first, second


def _places(texts: Sequence[Sequence[int]], window: int) -> tuple[list[tuple[int, int]], int]:
    """Possible beginnings of prompts, as text number and token, and the length of their documents."""
    tail = QUESTION_TOKENS + REST_TOKENS
    longest = min(window, max((len(ids) for ids in texts), default=0))
    piece = min(PIECE_TOKENS, (longest - tail) // PIECES)
    if piece < _LEAST_PIECE:
        msg = f"links are measured on texts of at least {PIECES * _LEAST_PIECE + tail} tokens; give a longer one"
        raise ArgumentError(msg)
    length = PIECES * piece + tail
    places = [(which, start) for which, ids in enumerate(texts) for start in range(0, len(ids) - length + 1, piece)]
    return places, piece


def _chosen(places: Sequence[tuple[int, int]], count: int, seed: int) -> list[tuple[int, int]]:
    generator = random.Random(seed)  # noqa: S311 - a choice of texts
    return sorted(generator.sample(places, min(count, len(places))))


def _cut(text: Sequence[int], at: int, piece: int) -> CheckPrompt:
    end = PIECES * piece
    ids = text[at : at + end + QUESTION_TOKENS + REST_TOKENS]
    documents = tuple(tuple(ids[start : start + piece]) for start in range(0, end, piece))
    return CheckPrompt(documents, tuple(ids[end : end + QUESTION_TOKENS]), tuple(ids[end + QUESTION_TOKENS :]))


def check_links(
    engine: Engine,
    prompts: Sequence[CheckPrompt],
    profile: AnyProfile | None = None,
    *,
    bound: float = LinkReport.bound,
    shift: LinkShift | None = None,
    neutral: int = 0,
    tell: Callable[[int], object] = lambda _: None,
) -> LinkReport:
    """Measure links: first whether they are exact, then their loss, and what repair restores."""
    if not prompts:
        raise ArgumentError("links are measured on at least one prompt")
    check_exact(engine, prompts[0])
    rows = []
    for number, prompt in enumerate(prompts):
        rows.append(_Measured(engine, prompt, shift, neutral).figures(profile if number < _LEVEL_PROMPTS else None))
        tell(number + 1)
    linked = torch.tensor([row["linked"] for row in rows], dtype=torch.float64)
    spread = float(linked.std() / sqrt(len(rows))) if len(rows) > 1 else 0.0
    names = [name for name in MEASURED_SELECTORS if (name, SHARES[0]) in rows[0]]
    levels = [key[1] for key in rows[0] if isinstance(key, tuple) and key[0] == "level"]
    gained = {} if shift is None else shift_figures(rows, shift, names)
    return LinkReport(
        model_id=engine.meta.model_id, prompts=len(rows), no_documents=_mean(rows, "nothing"),
        linked=float(linked.mean()), linked_error=spread, shares=SHARES,
        repaired={name: tuple(_mean(rows, (name, share)) for share in SHARES) for name in names},
        levels={str(level): _mean(rows, ("level", level)) for level in levels},
        levels_repaired={str(level): _mean(rows, ("level repaired", level)) for level in levels if names},
        repaired_share=_LEVEL_SHARE if levels and names else 0.0, bound=bound, neutral=neutral, **gained,
    )  # fmt: skip


def check_exact(engine: Engine, prompt: CheckPrompt) -> None:
    """Refuse a model if linked documents do not equal one masked pass."""
    caches, continuation = engine.prefill(prompt.documents), [*prompt.question, *prompt.rest]
    linked, text = link(caches), prompt.text  # without BOS, which would be at another distance in the prompt
    bound = _EXACT.get(engine.dtype, _EXACT_HALF)
    masked = getattr(engine, "masked_forward", None)
    if masked is not None:
        visible = block_mask([len(ids) for ids in prompt.documents], len(continuation))
        expected = masked([*text, *continuation], visible)[len(text) :]
        _check_equal(expected, _after(engine, linked, continuation), bound, "linked documents", "positions or masks")
    try:
        engine.update_rows(linked, text, torch.arange(len(text)))
    except MismatchError:
        return  # the engine cannot repair
    expected = engine.forward(None, [*text, *continuation], 0)[len(text) :]
    _check_equal(
        expected, _after(engine, linked, continuation), bound, "a prompt of which all rows are repaired", "masks"
    )


def _after(engine: Engine, cache: KVCache, rest: Sequence[int]) -> Tensor:
    return engine.forward(engine.past_key_values(cache), rest, cache.tokens)


def _check_equal(expected: Tensor, actual: Tensor, bound: float, what: str, why: str) -> None:
    difference = float((expected.float() - actual.float()).abs().max() / expected.float().std().clamp_min(1e-12))
    if not difference <= bound:
        raise MismatchError(
            f"{what} differ from one pass of this model by {difference:.2g} of the spread of logits (allowed: "
            f"{bound:g}): kvwire misreads its {why}; run its prompts as text and report this"
        )


class _Measured:
    """One prompt and its measurements."""

    def __init__(self, engine: Engine, prompt: CheckPrompt, shift: LinkShift | None, neutral: int) -> None:
        self._engine, self._prompt, self._shift = engine, prompt, shift
        self._rest = [*prompt.question, *prompt.rest]
        self._caches = compute_documents(engine, prompt.documents, neutral)
        whole = [*engine.opening_tokens, *prompt.text, *self._rest]
        self._full = self._seen(engine.forward(None, whole, 0, logits=len(self._rest)))

    def _seen(self, logits: Tensor) -> Tensor:
        """Logits that predict the tokens after the question, or else those of the question."""
        last = len(self._prompt.question) - 1
        return logits[last:-1] if self._prompt.rest else logits

    def _kl(self, logits: Tensor) -> float:
        kl = mean_kl(self._full, self._seen(logits))
        if not isfinite(kl):
            raise MismatchError(
                "the model gives logits that are not finite over linked documents; open it with --dtype float32, and "
                "run its prompts as text where that does not help"
            )
        return max(0.0, kl)

    def _kl_behind(self, cache: KVCache) -> float:
        return self._kl(_after(self._engine, cache, self._rest))

    def figures(self, profile: AnyProfile | None) -> dict[object, float]:
        """KL divergences from a full prefill, by treatment."""
        engine, alone = self._engine, [*self._engine.opening_tokens, *self._rest]
        out: dict[object, float] = {
            "nothing": self._kl(engine.forward(None, alone, 0, logits=len(self._rest))),
            "linked": self._kl_behind(self._linked(self._caches, None)),
        }
        if self._shift is not None:
            out["shifted"] = self._kl_behind(self._linked(self._caches, self._shift))
        for name in MEASURED_SELECTORS:
            for share in SHARES:
                kl = self._repaired(self._caches, name, share)
                if kl is not None:
                    out[name, share] = kl
                if kl is not None and self._shift is not None:
                    shifted = self._repaired(self._caches, name, share, self._shift)
                    out["shifted", name, share] = kl if shifted is None else shifted
        if isinstance(profile, Profile):
            for level, caches in self._decoded(profile):
                out["level", level] = self._kl_behind(self._linked(caches, None))
                kl = self._repaired(caches, DEFAULT_SELECTOR, _LEVEL_SHARE)
                if kl is not None:
                    out["level repaired", level] = kl
        return out

    def _linked(self, caches: Sequence[KVCache], shift: LinkShift | None) -> KVCache:
        linked = link_opened(self._engine, caches)
        if shift is not None:
            shift.apply(linked, self._lengths)
        return linked

    @property
    def _lengths(self) -> tuple[int, ...]:
        """Lengths of the documents; opening tokens count with the first one."""
        first, *others = (len(ids) for ids in self._prompt.documents)
        return (len(self._engine.opening_tokens) + first, *others)

    def _repaired(
        self, caches: Sequence[KVCache], selector: str, share: float, shift: LinkShift | None = None
    ) -> float | None:
        """Repair a linked prompt; None if the engine cannot."""
        prompt, linked = self._prompt, self._linked(caches, shift)
        ids = (*self._engine.opening_tokens, *prompt.text)
        repair = RepairInput(self._engine, linked, ids, self._lengths, prompt.question)
        try:
            repair_prompt(repair, selector_of(selector), share)
        except MismatchError:
            return None
        return self._kl_behind(linked)

    def _decoded(self, profile: Profile) -> Iterator[tuple[str, list[KVCache]]]:
        engine, prompt = self._engine, self._prompt
        hidden = [
            states_of(engine, ids, profile.prefix_layers) if profile.prefix_layers else None for ids in prompt.documents
        ]
        blobs = [encode(cache, profile, hidden=state) for cache, state in zip(self._caches, hidden, strict=True)]
        for level, info in enumerate(inspect(blobs[0]).levels):
            caches = [
                decode(blob, level, profile, engine.device, engine.dtype, hidden=state, offset=cache.meta.offset)
                for blob, state, cache in zip(blobs, hidden, self._caches, strict=True)
            ]
            yield info.name, caches


def _mean(rows: Sequence[dict[object, float]], key: object) -> float:
    """Mean over the prompts with this figure."""
    found = [row[key] for row in rows if key in row]
    return sum(found) / len(found)


def shortened(prompts: Sequence[CheckPrompt], window: int) -> list[CheckPrompt]:
    """Shorten prompts to a model's window; tokens after the question are cut first."""
    out = []
    for prompt in prompts:
        room = window - len(prompt.text) - len(prompt.question)
        if room > 0 and prompt.question and all(prompt.documents):
            out.append(replace(prompt, rest=prompt.rest[:room]))
    return out


LEAST_PROMPTS = 8
"""Fewest prompts to learn from."""
_Z = 1.959964


def learn_shift(
    engine: Engine, prompts: Sequence[Sequence[Sequence[int]]], *, tell: Callable[[int], object] = lambda _: None
) -> LinkShift | None:
    """Learn the mean shift of linked documents over prompts."""
    usable = [prompt for prompt in prompts if len(prompt) > 1]
    if len(usable) < LEAST_PROMPTS:
        return None
    try:
        learner = ShiftLearner(engine.meta)
    except MismatchError:
        return None
    for number, documents in enumerate(usable):
        (whole,) = prefill_documents(engine, [[token for ids in documents for token in ids]])
        learner.add(prefill_documents(engine, documents), whole)
        tell(number + 1)
    return learner.finish()


def shift_figures(rows: Sequence[dict[object, float]], shift: LinkShift, selectors: Sequence[str]) -> dict[str, Any]:
    """Figures of a report on a mean shift.

    It is named, and so used by loads, if it surely helps at ``GAIN_SHARE`` of the rows, and surely harms at no other.
    """
    shares = sorted({key[1] for key in rows[0] if isinstance(key, tuple) and key[0] == DEFAULT_SELECTOR})
    gains = {0.0: gain_of([row["linked"] - row["shifted"] for row in rows])}
    for share in shares:
        ours, plain = ("shifted", DEFAULT_SELECTOR, share), (DEFAULT_SELECTOR, share)
        gains[share] = gain_of([row[plain] - row[ours] for row in rows if plain in row])
    gain = gains[GAIN_SHARE if GAIN_SHARE in gains else 0.0]
    helps = gain[1] > 0 and all(high >= 0 for _, _, high in gains.values())
    return {
        "shift": shift.digest if helps else "", "shift_prompts": shift.prompts, "shift_gain": gain,
        "shifted": fmean(row["shifted"] for row in rows),
        "shifted_repaired": {
            name: tuple(_mean(rows, ("shifted", name, share)) for share in shares) for name in selectors
        },
    }  # fmt: skip


def gain_of(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences, with its 95 % interval by Student's t."""
    mean, count = fmean(differences), len(differences)
    if count < 2:  # noqa: PLR2004
        return mean, -abs(mean), abs(mean)
    half = _t(count - 1) * stdev(differences) / sqrt(count)
    return mean, mean - half, mean + half


def _t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, else within 1.5 % (Cornish-Fisher)."""
    if freedom <= 2:  # noqa: PLR2004
        return (12.7062, 4.30265)[freedom - 1]
    z = _Z
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + (z**3 + z) / (4 * freedom) + second + third
