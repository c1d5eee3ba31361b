"""The codec's entry points: encode a cache, decode a blob, inspect and verify a blob."""
