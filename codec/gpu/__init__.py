"""Everything that runs on a GPU: Triton kernels and what prepares their work."""
