"""For tests: a server in a thread, blobs without tensors."""

from kvwire.transport.testing.plain_blobs import build_blob, read_blob_head
from kvwire.transport.testing.serving import serving

__all__ = ["build_blob", "read_blob_head", "serving"]
