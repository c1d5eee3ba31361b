"""Decides, chunk by chunk, whether to recompute or to fetch and how finely; does no I/O and owns no clock."""

from .costs import CostCorrection, CostModel, CostRatio, DecodeCost, PrefillCost, fit_decode, fit_prefill
from .documents import DocumentPlanInput
from .estimators import BandwidthEstimator, BandwidthSettings, TtfbEstimator
from .events import (
    Cancel,
    ChunkArrived,
    ChunkFailed,
    Decode,
    DecodeDone,
    DecodeFailed,
    Event,
    Fail,
    Fetch,
    Finish,
    FirstByte,
    Instruction,
    LogEntry,
    Recompute,
    RecomputeDone,
    RecomputeFailed,
    Started,
    Tick,
    TransferProgress,
)
from .naive import finish_naive, plan_naive
from .planner import Choice, plan
from .request import InFlight, OpenChunk, Plan, PlanRequest
from .session import LoadSession
from .settings import SessionSettings

__all__ = [
    "BandwidthEstimator",
    "BandwidthSettings",
    "Cancel",
    "Choice",
    "ChunkArrived",
    "ChunkFailed",
    "CostCorrection",
    "CostModel",
    "CostRatio",
    "Decode",
    "DecodeCost",
    "DecodeDone",
    "DecodeFailed",
    "DocumentPlanInput",
    "Event",
    "Fail",
    "Fetch",
    "Finish",
    "FirstByte",
    "InFlight",
    "Instruction",
    "LoadSession",
    "LogEntry",
    "OpenChunk",
    "Plan",
    "PlanRequest",
    "PrefillCost",
    "Recompute",
    "RecomputeDone",
    "RecomputeFailed",
    "SessionSettings",
    "Started",
    "Tick",
    "TransferProgress",
    "TtfbEstimator",
    "finish_naive",
    "fit_decode",
    "fit_prefill",
    "plan",
    "plan_naive",
]
