"""The transformers engine."""
