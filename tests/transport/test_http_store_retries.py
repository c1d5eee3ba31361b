"""An HTTP store asks again where a server is busy or a connection breaks, and not where asking cannot help."""

import time
from contextlib import closing

import pytest

from kvwire.errors import NotFoundError, StorageError
from kvwire.store import MemoryStore
from kvwire.transport import HttpStore, HttpStoreSettings
from kvwire.transport.testing import serving

from ..fault_proxy import FaultKind, FaultProxy, ProxyFault, first

QUICK = HttpStoreSettings(stall_s=5, backoff_s=0.01)
KEY = "v1/" + "ab" * 16 + "/" + "cd" * 8 + "/" + "a" * 2 + "/" + "aa" * 32 + ".kvw"
PASSING = [
    ProxyFault(FaultKind.STATUS, status=503),
    ProxyFault(FaultKind.STATUS, status=500),
    ProxyFault(FaultKind.STATUS, status=429),
    ProxyFault(FaultKind.RESET, after=2),
    ProxyFault(FaultKind.TRUNCATE, after=2),
    ProxyFault(FaultKind.HANG_UP),
]


@pytest.fixture(scope="module")
def proxied():
    store = MemoryStore()
    store.put(KEY, b"content")
    with serving(store) as url, FaultProxy(url) as proxy:
        yield proxy


def asked(proxy, plan, key=KEY, settings=QUICK):
    """What ``get`` gives or raises, and how many requests that took."""
    proxy.plan = plan
    before = proxy.requests
    with closing(HttpStore(proxy.url, settings=settings)) as store:
        try:
            found = store.get(key)
        except (StorageError, NotFoundError) as error:
            found = error
    return found, proxy.requests - before


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: f"{fault.kind.name} {fault.status}")
def test_two_failures_cost_time_and_a_server_that_always_fails_is_given_up(proxied, fault):
    assert asked(proxied, first(fault, 2)) == (b"content", 3)
    found, requests = asked(proxied, lambda _: fault)
    assert isinstance(found, StorageError)
    assert requests == 3


def test_a_server_that_says_when_is_obeyed_within_a_limit(proxied):
    started = time.monotonic()
    assert asked(proxied, first(ProxyFault(FaultKind.STATUS, status=503, retry_after=1)))[0] == b"content"
    assert time.monotonic() - started >= 1
    settings = HttpStoreSettings(backoff_s=0.01, max_wait_s=1)
    started = time.monotonic()
    late = first(ProxyFault(FaultKind.STATUS, status=429, retry_after=2))
    assert asked(proxied, late, settings=settings) == (b"content", 2)
    assert time.monotonic() - started >= 1
    found, requests = asked(proxied, first(ProxyFault(FaultKind.STATUS, status=429, retry_after=3)), settings=settings)
    assert isinstance(found, StorageError)
    assert "try again in 3 s" in str(found)
    assert requests == 1  # the others would come too early, too


def test_silence_is_waited_for_once_and_what_is_not_there_asked_for_once(proxied):
    silent, brief = ProxyFault(FaultKind.SILENT, seconds=5), HttpStoreSettings(stall_s=0.5)
    found, requests = asked(proxied, lambda _: silent, settings=brief)
    assert isinstance(found, StorageError)
    assert "timed out" in str(found)
    assert requests == 1
    found, requests = asked(proxied, None, key=KEY.replace("aa", "bb"))
    assert isinstance(found, NotFoundError)
    assert requests == 1
