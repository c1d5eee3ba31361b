"""Texts much like a prompt: an index from sketches of texts to documents whose rows may serve it."""
