"""One experiment: a link, an engine, documents, a goal, and what goes wrong; any policy can be put to it.

Everything follows from the scenario alone: the same one gives the same outcomes, policy by policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from ..core import Controller
from ..documents import DocumentPlanInput
from ..estimates import Estimates
from ..policies import Adaptive, Raw, TextOnly
from ..settings import ControllerSettings, Goal
from .loads import LoadArrival, Trouble
from .machines import costs
from .offline_optimum import optimum
from .sizes import documents_for, raw_of
from .world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.types.rates import RateTrace

    from ..costs import CostModel
    from ..events import LogEntry
    from ..policies import Policy
    from ..repair import RepairOption
    from .loads import Outcome
    from .machines import Machine
    from .models import Model
    from .offline_optimum import Optimum

Variants = tuple[DocumentPlanInput, ...]

_PAUSE_S = 0.5  # between the load that makes estimates warm and the first one that counts
_LIMIT_S = 1e5


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a load, or several that share a link and an engine, are faced with.

    Attributes:
        model: Shape of the model.
        machine: The machine.
        documents: Each with its variants, usually one, see ``variants_for``.
        rate: Of the link, in the time of its trace.
        goal: What is wanted, and by when.
        rtt_s: Seconds of a round trip.
        query_tokens: Length of the question.
        start_s: Second of the trace at which the clock of the loads starts.
        asked: When loads come in, in seconds after ``start_s`` of the trace.
        trouble: What goes wrong, by ``seed``.
        repair: What repairing links may take and gives; None: they stay as they are.
        attention: What the question attends to, see ``Looked``; empty: nobody looks.
        warm: An earlier load over the same link has taught the estimates; it begins at second 0, ends before
            ``start_s`` or puts it off, and is the same for every policy.
        bandwidth_error: Factor by which the prior of the link's bandwidth is wrong; it is otherwise the trace's mean.
        prefill_error: Factor by which the prior of prefill's seconds is wrong; it is otherwise true.
        leaves_s: Seconds after which nobody waits for a load any more: it has failed.
        seed: Of what is drawn.
    """

    model: Model
    machine: Machine
    documents: tuple[Variants, ...]
    rate: RateTrace
    goal: Goal
    rtt_s: float = 0.002
    query_tokens: int = 32
    start_s: float = 0.0
    asked: tuple[float, ...] = (0.0,)
    trouble: Trouble = field(default_factory=Trouble)
    repair: RepairOption | None = None
    attention: tuple[tuple[float, ...], ...] = ()
    warm: bool = True
    bandwidth_error: float = 1.0
    prefill_error: float = 1.0
    leaves_s: float = inf
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be played."""
        instants = (self.start_s, self.rtt_s, *self.asked)
        if not self.documents or not self.asked or not all(isfinite(at) and at >= 0 for at in instants):
            msg = "a scenario needs a document, a load, and a start, a round trip and arrivals of 0 s or later"
            raise ArgumentError(msg)
        if not all(isfinite(ratio) and ratio > 0 for ratio in (self.bandwidth_error, self.prefill_error)):
            raise ArgumentError("priors are wrong by finite factors above 0; 1: they are right")
        if not self.leaves_s > 0:
            raise ArgumentError("a load waits for more than 0 s")
        if not self.rate.mean_bytes_s:
            raise ArgumentError("nothing ever comes over this link in the long run; its mean rate must be above 0")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(sum(variants[0].tokens) for variants in self.documents)

    @cached_property
    def costs(self) -> CostModel:
        """What computing truly costs."""
        return replace(costs(self.model, self.machine), query_tokens=self.query_tokens)

    def priors(self) -> Estimates:
        """Estimates of a process that starts."""
        wrong = replace(self.costs, prefill=self.costs.prefill.scaled(self.prefill_error))
        return Estimates(wrong, self.rate.mean_bytes_s * self.bandwidth_error, self.rtt_s)

    @cached_property
    def _known(self) -> tuple[Estimates, float]:
        """Estimates when the first load comes in, and when that is."""
        estimates = self.priors()
        if not self.warm:
            return estimates, self.start_s
        controller = Controller(estimates, settings_for(self.machine), Adaptive())
        workers = self.machine.workers
        world = World(
            controller, self.rate, self.costs, rtt_s=self.rtt_s, steering=self.machine.steering, workers=workers,
            limit_s=_LIMIT_S,
        )  # fmt: skip
        (earlier,) = world.run([LoadArrival(0.0, self.documents, self.goal, self.query_tokens)])
        return estimates, max(self.start_s, earlier.ttft_s + _PAUSE_S)

    @property
    def begins_s(self) -> float:
        """Second of the trace at which the first load comes in: ``start_s``, or later where it is put off."""
        return self._known[1]

    def estimates(self) -> Estimates:
        """Estimates as they are when the first load comes in; a copy each time."""
        return self._known[0].copy()

    @cached_property
    def bounds(self) -> tuple[Optimum, ...]:
        """What no controller could better, for each load as if it were alone.

        The indexes' round trip counts, which ``TextOnly`` does without. Where documents have several variants: the best
        of the bounds for each variant taken by all documents; mixing them might be better still. A goal's ceiling does
        not count: what it forbids could only be better.
        """
        return tuple(self._bound(self.begins_s + at) for at in self.asked)

    def _bound(self, at: float) -> Optimum:
        goal, count = self.goal, min(len(variants) for variants in self.documents)
        # Nothing can begin before the indexes are there.
        left_s = None if goal.deadline_s is None else max(0.0, goal.deadline_s - self.rtt_s)
        found = [
            optimum(
                [variants[number] for variants in self.documents], self.costs, self.rate,
                start_s=at + self.rtt_s, rtt_s=self.rtt_s, objective=goal.objective, deadline_s=left_s,
                floor=goal.floor, workers=self.machine.workers,
            )
            for number in range(count)
        ]  # fmt: skip
        figure = {"earliest": "ttft_s", "quality": "error", "cheapest": "bytes"}[goal.objective]
        best = min(found, key=lambda each: (not each.in_time, getattr(each, figure) if each.in_time else each.ttft_s))
        return replace(best, ttft_s=best.ttft_s + self.rtt_s)


def variants_for(
    model: Model, lengths: Sequence[int], methods: Sequence[str] = ("kvwire",), seed: int = 0,
    max_kl: float | None = None,
) -> tuple[Variants, ...]:  # fmt: skip
    """Make documents of these lengths; see ``documents_for``.

    Args:
        model: Shape of the model.
        lengths: Tokens of each document.
        methods: How the documents are coded.
        seed: Of what is drawn.
        max_kl: See ``documents_for``.

    Returns:
        Documents, each as one variant for each method.
    """
    if not methods:
        raise ArgumentError("documents need at least one method")
    ways = [documents_for(model, lengths, method=method, seed=seed, max_kl=max_kl) for method in methods]
    return tuple(zip(*ways, strict=True))


def settings_for(machine: Machine) -> ControllerSettings:
    """How to steer loads of a machine: as loaders do that ship; see ``ControllerSettings.suited``."""
    return ControllerSettings.suited(on_gpu=machine.workers > 1, interrupts=True)


def simulate(
    scenario: Scenario,
    policy: Policy,
    *,
    settings: ControllerSettings | None = None,
    record: Callable[[LogEntry], object] | None = None,
) -> list[Outcome]:
    """Play a scenario under a policy.

    ``Raw`` gets the documents as plain bfloat16 and decodes by copying, ``TextOnly`` waits for no index of documents
    whose text there is.

    Args:
        scenario: What the loads are faced with.
        policy: Decides.
        settings: By default ``settings_for`` the machine.
        record: Called with every step of the controller.

    Returns:
        One outcome for each load, in the order of ``scenario.asked``.

    Raises:
        ArgumentError: The settings have another number of workers than the machine, or several threads for decoding,
            which the bounds do not know.
    """
    chosen = settings or settings_for(scenario.machine)
    if chosen.workers != scenario.machine.workers:
        msg = f"settings of {chosen.workers} workers for {scenario.machine.name}, which has {scenario.machine.workers}"
        raise ArgumentError(msg)
    if chosen.decode_threads > 1:
        msg = f"machines decode one batch at a time, not in {chosen.decode_threads} threads; leave decode_threads at 1"
        raise ArgumentError(msg)
    if not policy.preemptible:
        # Such a policy waits: patience would turn it into another one on slow links.
        chosen = replace(chosen, patience_s=_LIMIT_S)
    documents, true, estimates = scenario.documents, scenario.costs, scenario.estimates()
    if isinstance(policy, Raw):
        documents = tuple((raw_of(scenario.model, variants[0]),) for variants in documents)
        true = replace(costs(scenario.model, scenario.machine, raw=True), query_tokens=scenario.query_tokens)
    world = World(
        Controller(estimates, chosen, policy, record=record), scenario.rate, true, rtt_s=scenario.rtt_s,
        trouble=scenario.trouble, steering=scenario.machine.steering, workers=chosen.workers, seed=scenario.seed,
        limit_s=scenario.begins_s + _LIMIT_S,
    )  # fmt: skip
    begin = scenario.begins_s
    at_once = isinstance(policy, TextOnly) and all(variants[0].has_text for variants in documents)
    index_s = 0.0 if at_once else None
    arrivals = [
        LoadArrival(
            begin + at,
            documents,
            scenario.goal,
            scenario.query_tokens,
            index_s,
            scenario.leaves_s,
            repair=scenario.repair,
            attention=scenario.attention,
        )
        for at in scenario.asked
    ]
    return world.run(arrivals)
