"""What a load is to achieve, and how loads are steered."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal, Self

from kvwire.errors import ArgumentError

Objective = Literal["earliest", "quality", "cheapest"]
OnLate = Literal["serve", "refuse"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a load is to achieve.

    Attributes:
        objective: ``earliest``: the soonest first token at the quality floor. ``quality``: the least error with the
            first token by the deadline. ``cheapest``: the fewest bytes with the first token by the deadline. Where
            nothing is in time, the soonest first token.
        deadline_s: Seconds from the asking to the first token; None: there is none, and only ``earliest`` makes sense.
        floor: The lowest level to use where there is a choice.
        ceiling: The finest level that is worth waiting for; None: any.
        on_late: What becomes of a load whose first token cannot be in time when all of its documents are known:
            ``serve`` it as soon as possible, or ``refuse`` it at once. A load is refused by what is known of the link;
            where that is next to nothing it is served. Without a deadline nothing is late.
    """

    objective: Objective = "earliest"
    deadline_s: float | None = None
    floor: int = 0
    ceiling: int | None = None
    on_late: OnLate = "serve"

    def __post_init__(self) -> None:
        """Refuse goals that nobody can mean."""
        if self.objective not in ("earliest", "quality", "cheapest"):
            raise ArgumentError(f"an objective is earliest, quality or cheapest, got {self.objective!r}")
        if self.deadline_s is not None and not isfinite(self.deadline_s):
            msg = f"a deadline must be a finite number of seconds, or None for none, got {self.deadline_s}"
            raise ArgumentError(msg)
        if self.on_late not in ("serve", "refuse"):
            msg = f"a load that would be late is served or refused: serve or refuse, got {self.on_late!r}"
            raise ArgumentError(msg)
        if self.deadline_s is None and self.objective != "earliest":
            raise ArgumentError(f"{self.objective} needs a deadline; give one, or ask for the earliest first token")
        if self.floor < 0 or (self.ceiling is not None and self.ceiling < self.floor):
            msg = f"a floor must be at least 0 and a ceiling no lower, got {self.floor} and {self.ceiling}"
            raise ArgumentError(msg)

    def verdict(self, ttft_s: float) -> str:
        """Say in words whether a first token is in time."""
        if self.deadline_s is None:
            return "all chunks are ready"
        left_s = self.deadline_s - ttft_s
        return f"in time by {left_s:.3f} s" if left_s >= 0 else f"late by {-left_s:.3f} s"

    @classmethod
    def within(cls, deadline_s: float | None, *, floor: int = 0) -> Goal:
        """The best quality within a deadline, or the soonest first token where there is none."""
        return cls(objective="earliest" if deadline_s is None else "quality", deadline_s=deadline_s, floor=floor)


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """How loads are steered.

    Attributes:
        max_in_flight: Fetches open at once, whatever the link would need to be busy; each takes a connection.
        horizon_s: Besides what two round trips carry, bytes are asked for that far ahead; little, so that later
            decisions can still change.
        workers: 1: decoding and recomputing take turns; 2: each has a lane of its own.
        decode_batch: Chunks decoded in one go at most.
        decode_threads: How many of them side by side, each by one thread.
        max_pass_s: A forward pass is not made longer than this where that can be helped, so that others get their turn.
        stall_s: Seconds without a byte after which the link counts as dead until one comes; sooner where recomputing
            must begin to keep a deadline.
        patience_s: Seconds that a fetch may take where nothing else says how long; and for which an engine that had to
            be stopped counts as slow, unless a pass keeps its time.
        max_failures: Fetches of one document in a row that bring nothing, after which its blob is given up.
        replan_s: Seconds for which a plan is used again, at least.
        plan_s: Seconds of the processor that making a plan takes, by ``benchmarks/decision_time.py``.
        plan_chunk_s: What it takes besides for each chunk that nothing was started for.
        plan_share: Share of the time that making plans may take; a plan stands no longer than the same share of the
            time that is left, since near a deadline every decision counts.
        reserve_s: Seconds of a deadline that plans leave unused, for what no model foresees: half of them where
            passes and decoding are known to take just what is expected, all of them where they are off by a twentieth.
        cancel_margin: A fetch is given up for recomputation where it would take that many times as long.
        memory_bytes: Of what was asked for, has arrived or is kept for refinement, over all loads.
        max_joined: Passes of different loads that are joined at most, where the engine can; 1: none.
        max_joined_tokens: Of all of their rows, padding and what stands before them included: they lie in memory twice.
        interrupts: The engine can stop a forward pass that runs: passes may then be long, since one that turns out to
            be slow is given up for what can still be fetched.
        stretch: A load without a deadline counts as due after this many times what its first plan expects; who is due
            first goes first.
    """

    max_in_flight: int = 128
    horizon_s: float = 0.005
    workers: int = 1
    decode_batch: int = 1
    decode_threads: int = 1
    max_pass_s: float = 0.5
    stall_s: float = 0.25
    patience_s: float = 30.0
    max_failures: int = 3
    replan_s: float = 0.005
    plan_s: float = 0.001
    plan_chunk_s: float = 1e-6
    plan_share: float = 0.05
    reserve_s: float = 0.005
    cancel_margin: float = 1.5
    memory_bytes: int = 1 << 32
    stretch: float = 3.0
    max_joined: int = 16
    max_joined_tokens: int = 32768
    interrupts: bool = False

    @classmethod
    def suited(cls, *, on_gpu: bool, threads: int = 1, interrupts: bool = False) -> Self:
        """What suits a machine: what loaders ship, and what simulations play."""
        if on_gpu:
            return cls(workers=2, decode_batch=64, interrupts=interrupts)
        # Two rounds of chunks in one go: telling of each that it is done costs time, too.
        return cls(workers=1, decode_batch=2 * threads, decode_threads=threads, interrupts=interrupts)

    def __post_init__(self) -> None:
        """Refuse settings under which no load would end."""
        counts = (
            self.max_in_flight, self.decode_batch, self.decode_threads, self.max_failures, self.memory_bytes,
            self.max_joined, self.max_joined_tokens,
        )  # fmt: skip
        if min(counts) < 1:
            raise ArgumentError(
                "max_in_flight, decode_batch, decode_threads, max_failures, memory_bytes, max_joined and "
                "max_joined_tokens must be at least 1"
            )
        if self.workers not in (1, 2):
            raise ArgumentError(f"workers must be 1 or 2, got {self.workers}")
        figures = (
            self.horizon_s, self.max_pass_s, self.stall_s, self.patience_s, self.replan_s, self.reserve_s,
            self.cancel_margin, self.stretch, self.plan_s, self.plan_chunk_s, self.plan_share,
        )  # fmt: skip
        if not all(isfinite(figure) for figure in figures):
            raise ArgumentError(f"all settings must be finite numbers, got {self}")
        positive = (self.stall_s, self.patience_s, self.max_pass_s, self.stretch, self.plan_share)
        if not (min(positive) > 0 and self.cancel_margin >= 1):
            msg = "stall_s, patience_s, max_pass_s, stretch and plan_share must be above 0 and cancel_margin at least 1"
            raise ArgumentError(msg)
        if min(self.reserve_s, self.replan_s, self.horizon_s, self.plan_s, self.plan_chunk_s) < 0:
            raise ArgumentError("reserve_s, replan_s, horizon_s, plan_s and plan_chunk_s must be at least 0")
