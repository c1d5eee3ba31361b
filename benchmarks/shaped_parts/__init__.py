"""Parts of ``benchmarks/shaped.py``; benchmarks that measure over real links use them too."""
