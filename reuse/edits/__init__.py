"""A stored cache becomes that of a similar prompt: equal tokens are moved, the others are computed."""
