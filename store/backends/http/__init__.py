"""A store behind HTTP."""
