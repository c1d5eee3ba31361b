"""Calibration of a corpus: texts that a profile is fitted on, and texts that its errors are measured on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvwire.reuse import compute_cached, own_tokens, stored_tokens
from kvwire.runtime.coding import EXTENTS, LEAST_TOKENS
from kvwire.runtime.computing import compute_document, without_anchors
from kvwire.runtime.kept_moments import MomentFile
from kvwire.runtime.opening import states_of
from kvwire.runtime.progress import PROGRESS
from kvwire.runtime.quality import calibrate_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec import AnyProfile, Ladder, Statistics
    from kvwire.codec.kinds.requests import Calibrated
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkLayout
    from kvwire.runtime.coding import Coding, Document
    from kvwire.types import KVCache

HELD_OUT, HELD_TOKENS, EACH_OUT = 24, 1280, 6
"""Texts at most to measure errors on, and tokens of all of them at least; without, of how many texts one is kept out of
the fit for that."""


class _Texts:
    """Calibration texts, as the level kinds' ``fit`` asks for them."""

    def __init__(
        self, engine: Engine, chosen: Sequence[Sequence[int]], others: Sequence[Sequence[int]], coding: Coding
    ) -> None:
        self._engine, self._chosen, self._others, self._coding = engine, chosen, others, coding
        self.keeper = MomentFile(coding.resume)

    def caches(self) -> list[KVCache]:
        from kvwire.runtime.spilled import spilled

        tokens = sum(map(len, self._chosen))
        PROGRESS.info("computing calibration texts: %d tokens of %d texts", tokens, len(self._chosen))
        return spilled(
            (compute_document(self._engine, ids, self._coding)[0] for ids in self._chosen), len(self._chosen)
        )

    def statistics(self, *, tokens: bool) -> Statistics | None:
        PROGRESS.info("gathering statistics: what attention weighs, and what errors do to answers")
        found = self._engine.statistics(self._chosen, tokens=tokens)
        PROGRESS.info("fitting the profile")
        return found

    def prefix_states(self, layers: int) -> list[Tensor]:
        return [states_of(self._engine, ids, layers) for ids in self._chosen]

    def calibrate_error(self, profile: Calibrated, ladder: Ladder | None) -> Calibrated:
        PROGRESS.info("measuring what errors do to answers, level by level")
        layout = self._coding.layout
        texts, compute = self._others or self._chosen, None
        if layout.anchors:  # a document that is cut within a chunk would be none of the layout
            texts = [own_tokens(layout, ids, self._engine.vocabulary_size) for ids in texts]
            compute = partial(compute_cached, self._engine, layout)
        profile = calibrate_error(self._engine, profile, texts, ladder, compute)
        held_out = int(bool(self._others) and profile.error_to_kl is not None)
        return replace(profile, notes=profile.notes | {"kl_held_out": held_out})


def calibration_texts(
    documents: Sequence[Document], tokens: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Texts to fit on, up to that many tokens, and others to measure errors on: seen text flatters a profile.

    The others are what comes next, the rest of a text that was cut included. Where that is less than ``HELD_TOKENS``
    and less than half of what is fitted on, every sixth text is kept out of the fit, if there are that many. Else there
    are none.
    """
    chosen: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    for document in documents:
        room = max(0, tokens - sum(map(len, chosen)))
        if room:
            chosen.append(document.token_ids[:room])
        if len(rest := document.token_ids[room:]) >= LEAST_TOKENS and len(others) < HELD_OUT:
            others.append(rest)
    if sum(map(len, others)) >= min(HELD_TOKENS, max(LEAST_TOKENS, sum(map(len, chosen)) // 2)):
        return chosen, others
    kept = [ids for number, ids in enumerate(chosen) if (number + 1) % EACH_OUT]
    out = chosen[EACH_OUT - 1 :: EACH_OUT]
    usable = min(map(len, out), default=0) >= LEAST_TOKENS and sum(map(len, kept)) >= LEAST_TOKENS
    return (kept, out) if usable else (chosen, [])


def texts_to_fit_on(
    engine: Engine, coding: Coding, documents: Sequence[Document], tokens: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """``calibration_texts`` as they are computed: cut between documents' own tokens, with the layout's anchors."""
    layout, size = coding.layout, engine.vocabulary_size
    chosen, others = calibration_texts([without_anchors(engine, coding, each) for each in documents], tokens)
    if layout.anchors:
        chosen, others = ([stored_tokens(layout, ids, size) for ids in texts] for texts in (chosen, others))
    return chosen, others


def tokens_to_take(coding: Coding, documents: Sequence[Document]) -> int:
    """How many of documents' tokens a profile is fitted on: see ``Coding.calibration_tokens``."""
    available = sum(len(document.token_ids) for document in documents)
    return EXTENTS[coding.calibration] if coding.layout.anchors else coding.calibration_tokens(available)


def tokens_to_fit_on(engine: Engine, coding: Coding, documents: Sequence[Document]) -> int:
    """On how much text a profile would be fitted, as profiles note it: of documents with anchors what is stored."""
    most = tokens_to_take(coding, documents)
    return _stored(coding.layout, texts_to_fit_on(engine, coding, documents, most)[0])


def _stored(layout: LinkLayout, texts: Sequence[Sequence[int]]) -> int:
    """Tokens of texts that a layout keeps."""
    kept = [(len(ids), layout.cache_stored(len(ids))) for ids in texts]
    return sum(length if stored is None else int(stored.sum()) for length, stored in kept)


def opens(engine: Engine, coding: Coding) -> int:
    """How many opening tokens, such as BOS, documents are computed behind; those with soft tokens have none."""
    return len(engine.opening_tokens) if min(coding.layout.cached_tokens, default=0) >= 0 else 0


def fit_profile_to(engine: Engine, coding: Coding, documents: Sequence[Document], tokens: int) -> AnyProfile | None:
    """Fit a profile on the first tokens of documents."""
    layout = coding.layout
    chosen, others = texts_to_fit_on(engine, coding, documents, tokens)
    if (left := _stored(layout, chosen)) < LEAST_TOKENS:
        return None
    notes: dict[str, str | int] = {}
    if engine.soft_tokens and min(layout.cached_tokens, default=0) < 0:
        notes["soft_tokens"] = engine.soft_tokens.digest
    if layout.anchors:
        notes["tokens"] = left
    if opening := opens(engine, coding):
        notes["opening"] = opening
    profile = coding.kind.fit(_Texts(engine, chosen, others, coding), coding)
    if profile is None or not notes:
        return profile
    return cast("AnyProfile", replace(cast("Any", profile), notes=profile.notes | notes))
