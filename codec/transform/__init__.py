"""Transform caches to quantised coefficients and back."""
