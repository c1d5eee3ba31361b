"""Parts of the benchmark of similar prompts."""
