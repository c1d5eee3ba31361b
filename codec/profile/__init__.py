"""What is learnt per model and shared by every blob of a corpus."""
