"""Bytes of blobs, segments, texts and named arrays, as docs/format.md specifies them."""
