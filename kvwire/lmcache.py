"""kvwire in LMCache: an L2 adapter that reads documents from a kvwire store.

LMCache finds it as ``{"type": "plugin", "module_path": "kvwire.lmcache", "class_name": "KvwireL2Adapter"}``. Only that
name needs LMCache.
"""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.engines.lmcache.adapter import KvwireL2Adapter

__all__ = ["KvwireL2Adapter"]

__getattr__ = lazy(__name__)
