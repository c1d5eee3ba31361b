"""Rows of a linked prompt computed anew, so that documents see those before them."""
