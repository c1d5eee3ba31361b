"""Decides, chunk by chunk, whether to recompute or to fetch and how finely; does no I/O and owns no clock."""

from .costs import CostModel, DecodeCost, PrefillCost, fit_decode, fit_prefill
from .documents import DocumentPlanInput
from .estimators import BandwidthEstimator, BandwidthSettings, TtfbEstimator
from .settings import ControllerSettings, Goal

__all__ = [
    "BandwidthEstimator",
    "BandwidthSettings",
    "ControllerSettings",
    "CostModel",
    "DecodeCost",
    "DocumentPlanInput",
    "Goal",
    "PrefillCost",
    "TtfbEstimator",
    "fit_decode",
    "fit_prefill",
]
