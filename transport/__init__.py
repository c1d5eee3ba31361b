"""Bytes over links: range fetcher, HTTP server, emulated link."""
