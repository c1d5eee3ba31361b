"""Recompute rows of a linked prompt, so that documents see those before them."""
