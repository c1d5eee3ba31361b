"""Plans of policies for a prompt, through a real controller that knows all documents and starts nothing.

Telling a controller of many documents takes much longer than planning, so one controller serves many plans.
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
    from collections.abc import Callable

    from kvwire.controller.policies import PlanRequest, Policy

    Variants = tuple[ctl.DocumentPlanInput, ...]

_BETWEEN_S = 1.0  # longer than the controller reuses a plan


class _RecordingPolicy:
    """A policy that starts nothing and records the last request.

    policy: used only to choose between variants, which takes plans of the documents known so far. repair_share: of a
    policy that decides how many rows to repair.
    """

    name, preemptible = "recording", True
    repair_share: Callable[[float, float], float]

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy

    def plan(self, request: PlanRequest) -> Plan:
        """Return an empty plan: no fetch, no recompute."""
        self.request, levels = request, np.zeros(request.chunks.count, np.int64)
        if self._policy is None:
            return Plan(levels, (), 0.0, 0.0, 0, in_time=True, reason="nothing begins")
        answer = self._policy.plan(request)
        return replace(answer, levels=levels, order=(), upgraded=frozenset(), refine=(), refine_levels=())


@dataclass(frozen=True, eq=False)
class QueriedPlan:
    """A request and a policy's plan for it."""

    request: PlanRequest  # the policy's input
    plan: Plan  # its output
    inputs: tuple[ctl.DocumentPlanInput, ...]  # the chosen variant of each document


class PlanQuery:
    """One prompt, goal and engine; plans for any link and policy."""

    def __init__(
        self,
        documents: tuple[Variants, ...],
        estimates: ctl.Estimates,
        goal: ctl.Goal,
        settings: ctl.ControllerSettings,
        query_tokens: int,
        repair: ctl.RepairOption | None = None,
    ) -> None:
        """Keep the prompt's inputs; the controller is made on first use."""
        self._repair = repair if len(documents) > 1 else None
        self._documents, self._estimates = documents, estimates
        self._goal, self._settings, self._query_tokens = goal, settings, query_tokens
        self._choosing = any(len(variants) > 1 for variants in documents)
        self._prepared: tuple[ctl.Controller, _RecordingPolicy] | None = None
        self._now = 0.0

    def ask(self, policy: Policy, bandwidth: ctl.BandwidthEstimator, since_s: float) -> QueriedPlan:
        """Let a policy plan the prompt."""
        if self._prepared is None or self._choosing or isinstance(policy, RepairRule):
            self._prepared = self._prepare(policy, bandwidth, since_s)
        else:
            self._prepared[0].estimates.bandwidth = bandwidth
            self._now += _BETWEEN_S
            self._prepared[0].handle(ev.Tick(), self._now)
        controller, recorder = self._prepared
        last = recorder.request
        left_s = None if last.left_s is None else last.left_s + (last.now - since_s)
        # A controller's first request is for cautious first steps; the whole load's plan is wanted.
        request = replace(last, left_s=left_s, now=since_s, risk=0.0, pass_chunks=inf)
        inputs = tuple(doc.input for doc in controller.loads[0].docs)
        return QueriedPlan(request, policy.plan(request), inputs)

    def _prepare(
        self, policy: Policy, bandwidth: ctl.BandwidthEstimator, since_s: float
    ) -> tuple[ctl.Controller, _RecordingPolicy]:
        """Make a controller that knows all documents."""
        estimates = self._estimates.copy()
        recorder = _RecordingPolicy(policy if self._choosing or isinstance(policy, RepairRule) else None)
        if isinstance(policy, RepairRule):
            recorder.repair_share = policy.repair_share
        estimates.bandwidth = bandwidth
        controller = ctl.Controller(estimates, self._settings, recorder)
        controller.handle(ev.LoadRequested(0, len(self._documents), self._query_tokens, self._goal, self._repair), 0.0)
        self._now = since_s
        for number, variants in enumerate(self._documents):
            for instruction in controller.handle(ev.IndexKnown(0, number, variants), since_s):
                if isinstance(instruction, ev.Fail):
                    raise ArgumentError(f"{instruction.reason}; give the document's text, or encode it again")
        return controller, recorder
