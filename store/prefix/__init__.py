"""Longest cached prefix of a prompt: an index from chained hashes of its chunks to documents that hold their tokens."""
