"""Slow links in front of fast ones."""
