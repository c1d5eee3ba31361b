"""Bytes over links: range fetcher, HTTP server and store, emulated link."""

from kvwire.transport.arrival import Arrival, FetchCounts, FetchSettings
from kvwire.transport.errors import (
    BusyError,
    ReplacedError,
    SegmentCorruptError,
    SegmentError,
    SegmentStorageError,
    StalledError,
)
from kvwire.transport.fetcher import BlobFetcher
from kvwire.transport.http_source import HttpSource, open_session
from kvwire.transport.http_store import HttpStore, HttpStoreSettings
from kvwire.transport.link import EmulatedLink, LinkSettings, RateSchedule, parse_link
from kvwire.transport.metering import LinkMeter, LinkSample
from kvwire.transport.opening import open_source
from kvwire.transport.ranges import Piece, Range, coalesce, split
from kvwire.transport.server import (
    AccessSettings,
    JsonLines,
    ObjectServer,
    ServerSettings,
    ServerTls,
    SigningKeys,
    TextLines,
    TlsFiles,
    listen,
    new_token,
    serve,
    sign_url,
)
from kvwire.transport.sources import ByteSource, LinkedSource, Patience, Sink, StoreSource, read_object

__all__ = [
    "AccessSettings",
    "Arrival",
    "BlobFetcher",
    "BusyError",
    "ByteSource",
    "EmulatedLink",
    "FetchCounts",
    "FetchSettings",
    "HttpSource",
    "HttpStore",
    "HttpStoreSettings",
    "JsonLines",
    "LinkMeter",
    "LinkSample",
    "LinkSettings",
    "LinkedSource",
    "ObjectServer",
    "Patience",
    "Piece",
    "Range",
    "RateSchedule",
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
    "coalesce",
    "listen",
    "new_token",
    "open_session",
    "open_source",
    "parse_link",
    "read_object",
    "serve",
    "sign_url",
    "split",
]
