"""Parts of the benchmark of predicted times to the first token."""
