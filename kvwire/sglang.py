"""kvwire in SGLang: a storage backend of its hierarchical cache that reads documents from a kvwire store.

SGLang finds it as ``{"backend_name": "kvwire", "module_path": "kvwire.sglang", "class_name": "KvwireStorage"}``. Only
that name needs SGLang.
"""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.engines.sglang.storage import KvwireStorage

__all__ = ["KvwireStorage"]

__getattr__ = lazy(__name__)
