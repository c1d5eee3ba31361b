"""Parts of ``benchmarks/fault_matrix.py`` and ``benchmarks/soak.py``; tests use them too."""
