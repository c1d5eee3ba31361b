"""What a policy is asked and what it answers: plain data, all times in seconds from now; and what single chunks take.

Chunks are columns of arrays, in prompt order, so that a plan of a long prompt takes a fraction of a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .costs import CostModel
    from .settings import Goal

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

RECOMPUTE = -1
"""In place of a level: the chunk is recomputed."""

SLOWEST = 1.0
"""Bytes per second below which a link is dead. Not 0: finishing times must stay finite so that they can be compared."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Chunks as columns; n of them, L levels at most."""

    document: Ints  # number of its document ``[n]``
    chunk: Ints  # number in its document ``[n]``
    tokens: Ints  # of each ``[n]``
    context: Ints  # tokens before the chunk in its document ``[n]``
    sizes: Ints  # bytes of levels 0..k ``[L, n]``; the last level that a chunk has is repeated
    errors: Floats  # once decoded up to level k ``[L, n]``; repeated likewise
    top: Ints  # finest level that can be fetched, -1 for none ``[n]``
    finest: Ints  # the document's finest ``[n]``
    exact_error: Floats  # what a recomputed chunk counts with: its own finest error, 0 without a blob ``[n]``
    can_text: Flags  # the chunk can be recomputed ``[n]``
    prefix_s: Floats  # seconds of computing prefix layers that its document still needs if any of it is fetched ``[n]``
    layered: Flags | None = None  # A finer level adds to the coarser ones ``[n]``; None: it does for all
    # the document's own: coarser levels are not fetched, and count as this one ``[n]``; None: 0 for all
    floor: Ints | None = None

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

    @cached_property
    def pairs(self) -> Floats:
        """Pairs of a chunk's token and one that it attends to ``[n]``."""
        return np.asarray(self.tokens * (self.context + self.tokens / 2))

    @cached_property
    def begins(self) -> Flags:
        """Chunks that the one before them is not directly before in their document ``[n]``."""
        first = np.ones(self.count, np.bool_)
        first[1:] = (self.document[1:] != self.document[:-1]) | (self.chunk[1:] - self.chunk[:-1] != 1)
        return first

    @cached_property
    def common(self) -> int:
        """Finest level that every chunk has and can also do without, being recomputed; -1 where there is none."""
        if not (self.count and self.can_text.all()) or (self.floor is not None and (self.top < self.floor).any()):
            return -1
        return int(self.top.min())

    def level_for(self, target: int | Ints) -> Ints:
        """Level to fetch so that quality is at least ``target``, RECOMPUTE where only recomputing gives that.

        A document's finest level stands for all above it, and its floor for all below. Where neither that level nor
        text can be had, the best level that can be had must do.
        """
        wanted = np.minimum(target if self.floor is None else np.maximum(target, self.floor), self.finest)
        fallback = np.where(self.can_text, RECOMPUTE, self.top)
        return np.where((wanted <= self.top) & (wanted >= 0), wanted, fallback)

    def bytes_at(self, levels: Ints) -> Ints:
        """Bytes up to each chunk's level; 0 where it is recomputed."""
        return np.where(levels < 0, 0, self.sizes[np.maximum(levels, 0), np.arange(self.count)])

    def errors_at(self, levels: Ints) -> Floats:
        """Error of each chunk at its level."""
        return np.where(levels < 0, self.exact_error, self.errors[np.maximum(levels, 0), np.arange(self.count)])


@dataclass(frozen=True, eq=False)
class UpgradeCandidates:
    """Chunks that have been fetched, or are being fetched, and could become better; m of them."""

    level: Ints  # asked for so far ``[m]``
    top: Ints  # the finest that they could become ``[m]``
    sizes: Ints  # bytes, as in ``Columns`` ``[L, m]``
    errors: Floats  # as in ``Columns`` ``[L, m]``
    tokens: Ints  # ``[m]``
    ready: Flags  # valid in the prompt and idle, so that a refinement can be asked for now ``[m]``


@dataclass(frozen=True, eq=False)
class CommittedWork:
    """What has been asked for already, by this load or by others that go first."""

    # bytes that each open fetch still needs, in the order of the requests ``[q]``
    wire: Floats = field(default_factory=lambda: np.zeros(0))
    work_s: Floats = field(default_factory=lambda: np.zeros(0))  # decoding that each brings ``[q]``
    prefill_s: float = 0.0  # recomputing that runs or waits
    decode_s: float = 0.0  # decoding that runs or waits
    ahead_bytes: float = 0.0  # what others will fetch first


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Everything that a plan depends on.

    Attributes:
        chunks: Nothing has been started for them.
        costs: Those of decoding are of a chunk among many.
        goal: What is wanted.
        bandwidth: Expected bytes per second.
        bandwidth_low: Bytes per second to rely on.
        prompt_tokens: Of all documents.
        refinable: Under way or ready, but could be better; None where the goal does not ask for that.
        committed: What has been asked for already.
        left_s: Seconds until the first token is due, None for no deadline; the reserve is taken off already.
        lead_s: Until the link delivers again, at most one time to first byte.
        ttfb_s: Seconds that a request waits for its first byte.
        workers: 1: decoding and recomputing take turns; 2: a lane each.
        now: The instant, for policies that look into the future.
        look_s: Seconds that running the question takes once all chunks are valid, to see which of them matter; None
            where that is not wanted, or is done.
        was_to_look: The plan before was to look: what is fetched since is what a look needs.
        pass_chunks: Chunks of a forward pass at most, where passes are kept short; infinite: all of a run.
        risk: Chance that the link falls so far, within a load, that what is asked for first decides what is in time.
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
    workers: int = 1
    now: float = 0.0
    look_s: float | None = None
    was_to_look: bool = False
    pass_chunks: float = inf
    risk: float = 0.0

    @cached_property
    def prefill_s(self) -> Floats:
        """Seconds of compute of each chunk when it is recomputed ``[n]``; not to be written to.

        A pass's fixed cost falls on its first chunk: a run's first one, and where passes are short every so many.
        """
        chunks, cost = self.chunks, self.costs.prefill
        seconds = cost.token_s * chunks.tokens + cost.pair_s * chunks.pairs
        begins, most = chunks.begins, self.pass_chunks
        if most < chunks.count:
            place = np.arange(chunks.count)
            begins = (place - np.maximum.accumulate(np.where(begins, place, 0))) % most < 1
        return np.asarray(seconds + cost.base_s * begins)


@dataclass(frozen=True, eq=False)
class Plan:
    """What to do with every open chunk, and what that should lead to.

    Attributes:
        levels: For each, RECOMPUTE or the level to fetch ``[n]``.
        order: Columns to fetch, first one first.
        finish_s: Predicted seconds from now to the first token.
        error: Predicted, mean over the tokens of the open chunks.
        bytes: To fetch for open chunks.
        in_time: The deadline is met by the prediction, or there is none.
        reason: Why, for all chunks that ``upgraded`` does not name.
        upgraded: Columns that got more than the others.
        refine: Columns of ``refinable`` to fetch finer levels of, first one first.
        looks: The question is to look at what is valid before finer levels are asked for.
        refine_levels: Up to which level, for each of these; empty: one more.
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
    refine_levels: Sequence[int] = ()
    looks: bool = False


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
        """Decide for every open chunk; without side effects.

        Args:
            request: What the plan depends on.

        Returns:
            The plan.
        """
        ...


@runtime_checkable
class RepairRule(Protocol):
    """A policy that says how many rows of a prompt are computed anew, in place of the controller."""

    def repair_share(self, load_s: float, prefill_s: float) -> float:
        """Choose the share.

        Args:
            load_s: Seconds that fetching all documents as finely as the goal allows takes, from their first byte on.
            prefill_s: Seconds that computing all of their rows takes.

        Returns:
            The share, 0 to 1; what was asked for by number goes first.
        """
        ...
