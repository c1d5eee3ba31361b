"""What a policy is asked and what it answers: plain data, all times in seconds from now.

Chunks are columns of arrays, in prompt order, so that a plan of a long prompt takes a fraction of a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvwire.controller.costs import CostModel
    from kvwire.controller.settings import Goal

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

RECOMPUTE = -1
"""In place of a level: the chunk is recomputed."""

SLOWEST = 1.0
"""Bytes per second below which a link is dead. Not 0: finishing times must stay finite so that they can be compared."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Chunks as columns; n of them, L levels at most.

    document, chunk, tokens: ``[n]``. context: tokens before the chunk in its document ``[n]``.
    sizes: bytes of levels 0..k ``[L, n]``. errors: once decoded up to k ``[L, n]``. Both repeat the last level that a
    chunk has. top: finest level that can be fetched, -1 for none ``[n]``. finest: the document's finest ``[n]``.
    exact_error: what a recomputed chunk counts with: its own finest error, 0 without a blob ``[n]``.
    can_text: the chunk can be recomputed ``[n]``.
    prefix_s: seconds of head start that its document still needs if any of it is fetched ``[n]``.
    """

    document: Ints
    chunk: Ints
    tokens: Ints
    context: Ints
    sizes: Ints
    errors: Floats
    top: Ints
    finest: Ints
    exact_error: Floats
    can_text: Flags
    prefix_s: Floats

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.tokens)

    @property
    def levels(self) -> int:
        """Number of levels that any of them may have; at least 1."""
        return len(self.sizes)

    @cached_property
    def can_fetch(self) -> Flags:
        """Chunks that have at least one level ``[n]``."""
        return self.top >= 0

    def level_for(self, target: int | Ints) -> Ints:
        """Level to fetch so that quality is at least ``target``, RECOMPUTE where only recomputing gives that.

        A document's finest level stands for all above it. Without text the best level that can be had must do.
        ``[n]``, or ``[targets, n]`` for a column of targets.
        """
        wanted = np.minimum(target, self.finest)
        fallback = np.where(self.can_text, RECOMPUTE, self.top)
        return np.where((wanted <= self.top) & (wanted >= 0), wanted, fallback)

    def bytes_at(self, levels: Ints) -> Ints:
        """Bytes up to each chunk's level; 0 where it is recomputed. levels: ``[..., n]``."""
        return np.where(levels < 0, 0, self.sizes[np.maximum(levels, 0), np.arange(self.count)])

    def errors_at(self, levels: Ints) -> Floats:
        """Error of each chunk at its level. levels: ``[..., n]``."""
        return np.where(levels < 0, self.exact_error, self.errors[np.maximum(levels, 0), np.arange(self.count)])


@dataclass(frozen=True, eq=False)
class UpgradeCandidates:
    """Chunks that have been fetched, or are being fetched, and could become better; m of them.

    level, top: asked for so far, and the finest that they could become ``[m]``. ready: valid in the prompt and idle, so
    that a refinement can be asked for now ``[m]``. sizes, errors: as in ``Columns`` ``[L, m]``. tokens: ``[m]``.
    """

    level: Ints
    top: Ints
    sizes: Ints
    errors: Floats
    tokens: Ints
    ready: Flags


@dataclass(frozen=True, eq=False)
class CommittedWork:
    """What has been asked for already, by this load or by others that go first.

    wire: bytes that each open fetch still needs, in the order of the requests ``[q]``. work_s: decoding that each
    brings ``[q]``. prefill_s, decode_s: compute that runs or waits. ahead_bytes: what others will fetch first.
    """

    wire: Floats = field(default_factory=lambda: np.zeros(0))
    work_s: Floats = field(default_factory=lambda: np.zeros(0))
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ahead_bytes: float = 0.0


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Everything that a plan depends on.

    chunks: nothing has been started for them. refinable: under way or ready, but could be better; None where the goal
    does not ask for that. committed: see there. costs: those of decoding are of a chunk among many.
    left_s: seconds until the first token is due, None for no deadline; the reserve is taken off already.
    prompt_tokens: of all documents. bandwidth, bandwidth_low: bytes per second, expected and to rely on.
    lead_s: until the link delivers again, at most one time to first byte. ttfb_s, parallel: what a request waits, and
    how many may be open. now: the instant, for policies that look into the future.
    """

    chunks: Columns
    costs: CostModel
    goal: Goal
    bandwidth: float
    bandwidth_low: float
    prompt_tokens: int
    refinable: UpgradeCandidates | None = None
    committed: CommittedWork = field(default_factory=CommittedWork)
    left_s: float | None = None
    lead_s: float = 0.0
    ttfb_s: float = 0.0
    parallel: int = 1
    workers: int = 1
    now: float = 0.0


@dataclass(frozen=True, eq=False)
class Plan:
    """What to do with every open chunk, and what that should lead to.

    levels: for each, RECOMPUTE or the level to fetch ``[n]``. order: columns to fetch, first one first.
    reason: why, for all chunks that ``upgraded`` does not name; upgraded: columns that got more than the others.
    refine: columns of ``refinable`` to fetch one more level of, first one first.
    finish_s: predicted seconds from now to the first token. error: predicted, mean over the tokens of the open chunks.
    bytes: to fetch for open chunks. in_time: the deadline is met by the prediction, or there is none.
    """

    levels: Ints
    order: Sequence[int]
    finish_s: float
    error: float
    bytes: int
    in_time: bool
    reason: str
    upgraded: frozenset[int] = frozenset()
    refine: Sequence[int] = ()


class Policy(Protocol):
    """Decides what to do with the chunks of a load, whenever the link or compute can take something new."""

    @property
    def name(self) -> str:
        """For tables and logs."""
        ...

    @property
    def preemptible(self) -> bool:
        """Whether the controller may second-guess the policy.

        True: a fetch is given up where recomputing is sooner, and a forward pass is kept short enough for plans to
        change their minds. False: fetches run to their end, passes are as long as the plan allows, and ``simulate``
        waits for fetches on slow links as long as they take.
        """
        ...

    def plan(self, request: PlanRequest) -> Plan:
        """Decide for every open chunk; without side effects."""
        ...
