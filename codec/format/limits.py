"""Bounds of the blob format that more than one stage keeps. See docs/format.md."""

MAX_LEVELS = 8
"""Quality levels of a blob."""
