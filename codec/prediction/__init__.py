"""Predict a document's cache before anything is decoded."""
