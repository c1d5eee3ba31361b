"""What a load would do, without doing it."""
