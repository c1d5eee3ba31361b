"""Policies: what to do with the chunks of a load, each in a file of its own behind one small interface."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.controller.policies.adaptive import Adaptive
    from kvwire.controller.policies.cachegen import CacheGen, CacheGenArtefact, CacheGenTimed
    from kvwire.controller.policies.simple import CacheBlend, Fixed, Raw, TextOnly
    from kvwire.controller.snapshot import RECOMPUTE, Plan, PlanRequest, Policy, RepairRule

__all__ = [
    "RECOMPUTE",
    "Adaptive",
    "CacheBlend",
    "CacheGen",
    "CacheGenArtefact",
    "CacheGenTimed",
    "Fixed",
    "Plan",
    "PlanRequest",
    "Policy",
    "Raw",
    "RepairRule",
    "TextOnly",
]

__getattr__ = lazy(__name__)
