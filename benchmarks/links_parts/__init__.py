"""Parts of the benchmark of trained linking."""
