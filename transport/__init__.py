"""Bytes over links: range fetcher, HTTP server and store, emulated link."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.store.backends.http.store import HttpStore, HttpStoreSettings
    from kvwire.transport.errors import (
        BusyError,
        RejectedError,
        ReplacedError,
        SegmentCorruptError,
        SegmentError,
        SegmentStorageError,
        StalledError,
    )
    from kvwire.transport.fetch.fetcher import BlobFetcher
    from kvwire.transport.fetch.metering import LinkMeter, LinkSample
    from kvwire.transport.fetch.ranges import Range, WantedRange, coalesce, split
    from kvwire.transport.fetch.types import FetchCounts, FetchedSegment, FetchSettings
    from kvwire.transport.links import EmulatedLink, LinkSettings, RateSchedule, parse_link
    from kvwire.transport.server.access import AccessSettings
    from kvwire.transport.server.application import ObjectServer
    from kvwire.transport.server.credentials import SigningKeys, new_token, sign_url
    from kvwire.transport.server.exchange import JsonLines, TextLines
    from kvwire.transport.server.listening import ServerTls, TlsFiles, listen, serve
    from kvwire.transport.server.settings import ServerSettings
    from kvwire.transport.sources.base import (
        ByteSource,
        LinkedSource,
        ReadTimeouts,
        Sink,
        StoreSource,
        read_object,
    )
    from kvwire.transport.sources.http import HttpSource, open_session
    from kvwire.transport.sources.open_source import open_document, open_source

__all__ = [
    "AccessSettings",
    "BlobFetcher",
    "BusyError",
    "ByteSource",
    "EmulatedLink",
    "FetchCounts",
    "FetchSettings",
    "FetchedSegment",
    "HttpSource",
    "HttpStore",
    "HttpStoreSettings",
    "JsonLines",
    "LinkMeter",
    "LinkSample",
    "LinkSettings",
    "LinkedSource",
    "ObjectServer",
    "Range",
    "RateSchedule",
    "ReadTimeouts",
    "RejectedError",
    "ReplacedError",
    "SegmentCorruptError",
    "SegmentError",
    "SegmentStorageError",
    "ServerSettings",
    "ServerTls",
    "SigningKeys",
    "Sink",
    "StalledError",
    "StoreSource",
    "TextLines",
    "TlsFiles",
    "WantedRange",
    "coalesce",
    "listen",
    "new_token",
    "open_document",
    "open_session",
    "open_source",
    "parse_link",
    "read_object",
    "serve",
    "sign_url",
    "split",
]

__getattr__ = lazy(__name__)
