"""Kinds of levels: how the segments of a level are encoded and decoded, one module each."""
