"""Policies: what to do with the chunks of a load, each in a file of its own behind one small interface."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.controller.policies.adaptive import Adaptive
    from kvwire.controller.policies.base import RECOMPUTE, Columns, Plan, PlanRequest, Policy, Promised, Refinable
    from kvwire.controller.policies.cachegen import CacheGen, CacheGenArtefact
    from kvwire.controller.policies.fixed import Fixed
    from kvwire.controller.policies.raw import Raw
    from kvwire.controller.policies.text import Text

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

__getattr__ = lazy(
    __name__,
    {
        "kvwire.controller.policies.adaptive": ("Adaptive",),
        "kvwire.controller.policies.base": (
            "Columns",
            "Plan",
            "PlanRequest",
            "Policy",
            "Promised",
            "RECOMPUTE",
            "Refinable",
        ),
        "kvwire.controller.policies.cachegen": ("CacheGen", "CacheGenArtefact"),
        "kvwire.controller.policies.fixed": ("Fixed",),
        "kvwire.controller.policies.raw": ("Raw",),
        "kvwire.controller.policies.text": ("Text",),
    },
)
