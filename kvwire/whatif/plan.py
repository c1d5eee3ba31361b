"""What a load would do and why, without doing it: the controller's own plan, what would come of it, and of others.

The plan is asked of the policy through a real controller. What comes of it, and of the alternatives, is played in the
simulator. Where a bandwidth turns a plan into another is found by asking again, by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire import controller as ctl
from kvwire.controller.policies import Adaptive
from kvwire.errors import ArgumentError
from kvwire.whatif.alternatives import predict_alternatives
from kvwire.whatif.break_even import find_break_evens, find_unchanged
from kvwire.whatif.records import Details
from kvwire.whatif.situation import PlanScenario, planned_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.whatif.break_even import BreakEven
    from kvwire.whatif.records import PlannedChunk, Prediction

    Variants = tuple[ctl.DocumentPlanInput, ...]

MOST_DOCUMENTS = 128
"""Of one plan: the time that planning takes grows with their square."""


@dataclass(frozen=True)
class LoadPlan:
    """A load as it would be.

    Attributes:
        goal: What the load is asked for.
        bandwidth: Expected bytes per second of the link.
        ttfb_s: Expected seconds to a first byte.
        query_tokens: Length of the question.
        chunks: What becomes of each chunk, in prompt order.
        prediction: Of this plan.
        expected_s: Seconds to the first token that the policy itself expects when all headers are read.
        alternatives: The same prompt in other ways.
        break_evens: Bandwidths from which something holds.
        unchanged: The bandwidths next below and above at which the first plan is another; None where there is none
            within bounds.
        level_names: For tables; level 0 first.
    """

    goal: ctl.Goal
    bandwidth: float
    ttfb_s: float
    query_tokens: int
    chunks: tuple[PlannedChunk, ...]
    prediction: Prediction
    expected_s: float
    alternatives: tuple[Prediction, ...]
    break_evens: tuple[BreakEven, ...]
    unchanged: tuple[float | None, float | None]
    level_names: tuple[str, ...]


def plan_load(
    documents: Sequence[ctl.DocumentPlanInput | Variants],
    estimates: ctl.Estimates,
    goal: ctl.Goal | None = None,
    *,
    settings: ctl.ControllerSettings | None = None,
    query_tokens: int = 32,
    details: Details | None = None,
    compare: bool = True,
    repair: ctl.RepairOption | None = None,
) -> LoadPlan:
    """Plan a load of these documents, each one input or several variants of one."""
    if not 1 <= len(documents) <= MOST_DOCUMENTS:
        msg = f"a plan needs at least one document and takes up to {MOST_DOCUMENTS}, got {len(documents)}; plan fewer"
        raise ArgumentError(msg)
    variants = tuple(each if isinstance(each, tuple) else (each,) for each in documents)
    situation = PlanScenario(
        variants,
        estimates,
        goal or ctl.Goal(),
        settings or ctl.ControllerSettings(),
        query_tokens,
        details or Details(),
        repair,
    )
    forecast = situation.forecast()
    played = situation.play(Adaptive(), forecast)
    return LoadPlan(
        goal=situation.goal,
        bandwidth=situation.bandwidth,
        ttfb_s=estimates.ttfb.value,
        query_tokens=query_tokens,
        chunks=tuple(planned_chunks(forecast, played)),
        prediction=situation.prediction("kvwire", forecast, played),
        expected_s=forecast.ttft_s,
        alternatives=tuple(predict_alternatives(situation)) if compare else (),
        break_evens=tuple(find_break_evens(situation)) if compare else (),
        unchanged=find_unchanged(situation, forecast) if compare else (None, None),
        level_names=situation.details.level_names,
    )
