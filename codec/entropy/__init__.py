"""Symbols to bits and back: tables, rANS, range coding, and the numba kernels."""
