"""The adapter for Hugging Face transformers."""

from kvwire.engines.transformers.engine import TransformersEngine
from kvwire.engines.transformers.opening import open_engine

__all__ = ["TransformersEngine", "open_engine"]
