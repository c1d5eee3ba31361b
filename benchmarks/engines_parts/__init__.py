"""Parts of ``benchmarks/engines.py``."""
