"""What a load would do and why: the controller's plan, its outcome, and alternatives.

The policy plans through a real controller. The simulator runs this plan and the alternatives. Bisection over repeated
plans finds the bandwidths at which the plan changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.controller.policies import Adaptive
from kvwire.errors import ArgumentError
from kvwire.whatif.alternatives import predict_alternatives
from kvwire.whatif.break_even import find_break_evens, find_unchanged
from kvwire.whatif.situation import planned_chunks
from kvwire.whatif.tiers import plan_tiers

if TYPE_CHECKING:
    from kvwire.whatif.break_even import BreakEven
    from kvwire.whatif.situation import PlannedChunk, PlanScenario, Prediction
    from kvwire.whatif.tiers import PlannedTier, Tier

MOST_DOCUMENTS = 128
"""Limit for one plan: planning time grows with the square."""


@dataclass(frozen=True)
class LoadPlan:
    """A load that was planned, not run."""

    scenario: PlanScenario  # what was planned
    chunks: tuple[PlannedChunk, ...]  # the treatment of each chunk, in prompt order
    prediction: Prediction  # outcome of this plan
    expected_s: float  # the policy's own estimate of the seconds to the first token, once all headers are read
    alternatives: tuple[Prediction, ...]  # other ways to load the same prompt
    break_evens: tuple[BreakEven, ...]  # bandwidths at which a statement becomes true
    # nearest bandwidths below and above with another first plan; None if there is none within bounds
    unchanged: tuple[float | None, float | None]
    tiers: tuple[PlannedTier, ...] = ()  # the same load from each of the devices that were named


def plan_load(
    scenario: PlanScenario, *, compare: bool = True, tiers: tuple[Tier, ...] = (), stored_bytes: int = 0
) -> LoadPlan:
    """Plan a load; stored_bytes: of all levels of its documents."""
    count = len(scenario.documents)
    if not 1 <= count <= MOST_DOCUMENTS:
        msg = f"a plan needs at least one document and takes up to {MOST_DOCUMENTS}, got {count}; plan fewer"
        raise ArgumentError(msg)
    forecast = scenario.forecast()
    played = scenario.play(Adaptive(), forecast)
    return LoadPlan(
        scenario=scenario,
        chunks=tuple(planned_chunks(forecast, played)),
        prediction=scenario.prediction("kvwire", forecast, played),
        expected_s=forecast.ttft_s,
        alternatives=tuple(predict_alternatives(scenario)) if compare else (),
        break_evens=tuple(find_break_evens(scenario)) if compare else (),
        unchanged=find_unchanged(scenario, forecast) if compare else (None, None),
        tiers=plan_tiers(scenario, tiers, stored_bytes) if tiers else (),
    )
