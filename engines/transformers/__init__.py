"""The adapter for Hugging Face transformers."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.engines.transformers.engine import TransformersEngine
    from kvwire.engines.transformers.generating import generate_inputs
    from kvwire.engines.transformers.model import DescribedModel
    from kvwire.engines.transformers.opening import open_engine

__all__ = [
    "DescribedModel",
    "TransformersEngine",
    "generate_inputs",
    "open_engine",
]

__getattr__ = lazy(__name__)
