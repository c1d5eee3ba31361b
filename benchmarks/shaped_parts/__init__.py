"""For benchmarks that measure over links which the kernel shapes."""
