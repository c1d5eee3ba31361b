"""Bounds of the blob format that more than one stage keeps. See docs/format.md."""

MAX_LEVELS = 8
"""Quality levels of a blob."""
MAX_SINKS = 64
"""Attention sinks of a blob: each takes a few kilobytes of the header, and is expanded when a decoder is made."""
MAX_CHUNK_SYMBOLS = 1 << 30
"""Tokens times coefficients of a chunk: 4096 tokens of the widest model there is; a lane's length stays in 16 bits."""
