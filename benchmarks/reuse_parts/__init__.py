"""What ``reuse.py`` draws, measures, works out and paints."""
