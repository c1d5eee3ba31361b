"""Caches to quantised coefficients and back."""
