"""What a load would do and why: the controller's plan, its outcome, and alternatives.

The policy plans through a real controller. The simulator runs this plan and the alternatives. Bisection over repeated
plans finds the bandwidths at which the plan changes.
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
from kvwire.whatif.tiers import plan_tiers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.whatif.break_even import BreakEven
    from kvwire.whatif.records import PlannedChunk, Prediction
    from kvwire.whatif.tiers import PlannedTier, Tier

    Variants = tuple[ctl.DocumentPlanInput, ...]

MOST_DOCUMENTS = 128
"""Limit for one plan: planning time grows with the square."""


@dataclass(frozen=True)
class LoadPlan:
    """A load that was planned, not run."""

    goal: ctl.Goal  # deadline, floor and objective of the load
    bandwidth: float  # expected, in bytes per second
    ttfb_s: float  # expected seconds to the first byte
    query_tokens: int  # length of the question
    chunks: tuple[PlannedChunk, ...]  # the treatment of each chunk, in prompt order
    prediction: Prediction  # outcome of this plan
    expected_s: float  # the policy's own estimate of the seconds to the first token, once all headers are read
    alternatives: tuple[Prediction, ...]  # other ways to load the same prompt
    break_evens: tuple[BreakEven, ...]  # bandwidths at which a statement becomes true
    # nearest bandwidths below and above with another first plan; None if there is none within bounds
    unchanged: tuple[float | None, float | None]
    level_names: tuple[str, ...]  # for tables; level 0 first
    tiers: tuple[PlannedTier, ...] = ()  # the same load from each of the devices that were named


def plan_load(  # noqa: PLR0913 - what is loaded, how, and what is compared
    documents: Sequence[ctl.DocumentPlanInput | Variants],
    estimates: ctl.Estimates,
    goal: ctl.Goal | None = None,
    *,
    settings: ctl.ControllerSettings | None = None,
    query_tokens: int = 32,
    details: Details | None = None,
    compare: bool = True,
    repair: ctl.RepairOption | None = None,
    tiers: tuple[Tier, ...] = (),
    stored_bytes: int = 0,
) -> LoadPlan:
    """Plan a load of these documents, each one input or several variants of one; stored_bytes: of all their levels."""
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
        tiers=plan_tiers(situation, tiers, stored_bytes) if tiers else (),
    )
