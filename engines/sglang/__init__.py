"""The adapter for SGLang; ``kvwire.sglang`` is its public name."""
