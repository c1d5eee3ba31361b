"""For tests of transfers: a proxy that makes HTTP exchanges go wrong, and a server in a thread."""

from kvwire.transport.testing.faults import FaultKind, ProxyFault, ProxyRecord, ProxyRequest, at_random, first, nth
from kvwire.transport.testing.proxy import FaultProxy
from kvwire.transport.testing.serving import serving

__all__ = [
    "FaultKind",
    "FaultProxy",
    "ProxyFault",
    "ProxyRecord",
    "ProxyRequest",
    "at_random",
    "first",
    "nth",
    "serving",
]
