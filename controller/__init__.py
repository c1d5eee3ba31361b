"""Decides, chunk by chunk, whether to recompute or to fetch and how finely; does no I/O and owns no clock."""

from .core import Controller, replay
from .costs import CostModel, DecodeCost, PrefillCost, fit_decode, fit_prefill
from .documents import DocumentPlanInput
from .estimates import Estimates
from .estimators import BandwidthEstimator, BandwidthSettings, TtfbEstimator
from .events import LogEntry
from .policies import Adaptive, Policy
from .settings import ControllerSettings, Goal, Objective

__all__ = [
    "Adaptive",
    "BandwidthEstimator",
    "BandwidthSettings",
    "Controller",
    "ControllerSettings",
    "CostModel",
    "DecodeCost",
    "DocumentPlanInput",
    "Estimates",
    "Goal",
    "LogEntry",
    "Objective",
    "Policy",
    "PrefillCost",
    "TtfbEstimator",
    "fit_decode",
    "fit_prefill",
    "replay",
]
