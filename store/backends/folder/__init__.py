"""A store in a folder."""
