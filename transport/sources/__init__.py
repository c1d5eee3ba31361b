"""Where the bytes of one object come from."""
