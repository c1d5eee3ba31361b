"""The adapter for LMCache; ``kvwire.lmcache`` is its public name."""
