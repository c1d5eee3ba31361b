"""GPU code: Triton kernels and the preparation of their inputs."""
