"""What policies would plan for a prompt, asked through a real controller that knows all documents and begins nothing.

Making a controller know many documents takes much longer than a plan of them, so that it is asked again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire import controller as ctl
from kvwire.controller import events as ev
from kvwire.controller.policies import Plan, RepairRule
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.controller.policies import PlanRequest, Policy

    Variants = tuple[ctl.DocumentPlanInput, ...]

_BETWEEN_S = 1.0  # longer than any plan is used again


class _Patient:
    """A policy that lets nothing begin, and keeps what it was asked last.

    policy: asked only where variants are to be chosen from, which takes plans of the documents known so far.
    """

    name, preemptible = "patient", True

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy

    def plan(self, request: PlanRequest) -> Plan:
        """Answer that there is nothing to fetch and nothing to recompute."""
        self.asked, levels = request, np.zeros(request.chunks.count, np.int64)
        if self._policy is None:
            return Plan(levels, (), 0.0, 0.0, 0, in_time=True, reason="nothing begins")
        answer = self._policy.plan(request)
        return replace(answer, levels=levels, order=(), upgraded=frozenset(), refine=(), refine_levels=())


class _Ruled(_Patient):
    """The same of a policy that says how many rows are computed anew."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._rule = policy

    def repair_share(self, load_s: float, prefill_s: float) -> float:
        """See ``RepairRule``."""
        return self._rule.repair_share(load_s, prefill_s) if isinstance(self._rule, RepairRule) else 0.0


@dataclass(frozen=True, eq=False)
class Answered:
    """A policy's plan.

    Attributes:
        asked: What the policy was told.
        plan: Its answer.
        inputs: The variant of each document that was chosen.
    """

    asked: PlanRequest
    plan: Plan
    inputs: tuple[ctl.DocumentPlanInput, ...]


class PlanQuery:
    """One prompt, goal and engine, over links of different bandwidths, under different policies."""

    def __init__(
        self,
        documents: tuple[Variants, ...],
        estimates: ctl.Estimates,
        goal: ctl.Goal,
        settings: ctl.ControllerSettings,
        query_tokens: int,
        repair: ctl.RepairOption | None = None,
    ) -> None:
        """Keep what the prompt is."""
        self._repair = repair if len(documents) > 1 else None
        self._documents, self._estimates = documents, estimates
        self._goal, self._settings, self._query_tokens = goal, settings, query_tokens
        self._choosing = any(len(variants) > 1 for variants in documents)
        self._known: tuple[ctl.Controller, _Patient] | None = None
        self._now = 0.0

    def ask(self, policy: Policy, bandwidth: ctl.BandwidthEstimator, since_s: float) -> Answered:
        """Ask a policy for its plan of the prompt."""
        if self._known is None or self._choosing or isinstance(policy, RepairRule):
            self._known = self._informed(policy, bandwidth, since_s)
        else:
            self._known[0].estimates.bandwidth = bandwidth
            self._now += _BETWEEN_S
            self._known[0].handle(ev.Tick(), self._now)
        controller, patient = self._known
        asked = patient.asked
        left_s = None if asked.left_s is None else asked.left_s + (asked.now - since_s)
        # What is asked for first is not what is wanted in the end.
        request = replace(asked, left_s=left_s, now=since_s, risk=0.0, pass_chunks=inf)
        inputs = tuple(doc.input for doc in controller.loads[0].docs)
        return Answered(request, policy.plan(request), inputs)

    def _informed(
        self, policy: Policy, bandwidth: ctl.BandwidthEstimator, since_s: float
    ) -> tuple[ctl.Controller, _Patient]:
        """A controller that knows all documents."""
        estimates = self._estimates.copy()
        ruled = _Ruled(policy) if isinstance(policy, RepairRule) else None
        patient = ruled or _Patient(policy if self._choosing else None)
        estimates.bandwidth = bandwidth
        controller = ctl.Controller(estimates, self._settings, patient)
        controller.handle(ev.LoadRequested(0, len(self._documents), self._query_tokens, self._goal, self._repair), 0.0)
        self._now = since_s
        for number, variants in enumerate(self._documents):
            for instruction in controller.handle(ev.IndexKnown(0, number, variants), since_s):
                if isinstance(instruction, ev.Fail):
                    msg = f"{instruction.reason}; give the document's text, or encode it again"
                    raise ArgumentError(msg)
        return controller, patient
