"""For tests: a proxy that makes HTTP exchanges go wrong, a server in a thread, blobs without tensors."""

from kvwire.transport.testing.faults import FaultKind, ProxyFault, ProxyRecord, ProxyRequest, at_random, first, nth
from kvwire.transport.testing.plain_blobs import build_blob, read_blob_head
from kvwire.transport.testing.proxy import FaultProxy
from kvwire.transport.testing.serving import serving

__all__ = [
    "FaultKind",
    "FaultProxy",
    "ProxyFault",
    "ProxyRecord",
    "ProxyRequest",
    "at_random",
    "build_blob",
    "first",
    "nth",
    "read_blob_head",
    "serving",
]
