"""Tensors to bits and back: positions, transform, quantiser, entropy coders, container."""
