"""What the benchmarks of the controller share."""
