"""The profile of a model, shared by every blob of a corpus."""
