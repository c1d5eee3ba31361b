"""Decides, chunk by chunk, whether to recompute or to fetch and how finely; does no I/O and owns no clock."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.controller.core import Controller, replay
    from kvwire.controller.costs import CostModel, DecodeCost, PrefillCost, fit_decode, fit_joined, fit_prefill
    from kvwire.controller.documents import EXACT, MAX_KL, DocumentPlanInput, fetched_levels, kl_floor
    from kvwire.controller.estimates import Estimates
    from kvwire.controller.estimators import BandwidthEstimator, BandwidthSettings, RecentMedian
    from kvwire.controller.events import LogEntry
    from kvwire.controller.learning import DecodeEstimator, PrefillEstimator
    from kvwire.controller.policies import Adaptive, Policy
    from kvwire.controller.repair import RepairOption
    from kvwire.controller.settings import ControllerSettings, Goal, Objective, OnLate

__all__ = [
    "EXACT",
    "MAX_KL",
    "Adaptive",
    "BandwidthEstimator",
    "BandwidthSettings",
    "Controller",
    "ControllerSettings",
    "CostModel",
    "DecodeCost",
    "DecodeEstimator",
    "DocumentPlanInput",
    "Estimates",
    "Goal",
    "LogEntry",
    "Objective",
    "OnLate",
    "Policy",
    "PrefillCost",
    "PrefillEstimator",
    "RecentMedian",
    "RepairOption",
    "fetched_levels",
    "fit_decode",
    "fit_joined",
    "fit_prefill",
    "kl_floor",
    "replay",
]

__getattr__ = lazy(__name__)
