"""Entropy coding: tables, rANS, range coding, and the numba kernels."""
