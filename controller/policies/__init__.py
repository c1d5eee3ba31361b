"""Policies: what to do with the chunks of a load, each in a file of its own behind one small interface."""

from .adaptive import Adaptive
from .base import RECOMPUTE, Columns, Plan, PlanRequest, Policy, Promised, Refinable
from .cachegen import CacheGen, CacheGenArtefact
from .fixed import Fixed
from .raw import Raw
from .text import Text

__all__ = [
    "RECOMPUTE",
    "Adaptive",
    "CacheGen",
    "CacheGenArtefact",
    "Columns",
    "Fixed",
    "Plan",
    "PlanRequest",
    "Policy",
    "Promised",
    "Raw",
    "Refinable",
    "Text",
]
