"""Limits and waits of an S3 store."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.errors import ArgumentError

_MIB = 1 << 20
_LEAST_PART_BYTES = 5 * _MIB  # S3's rule for all parts but the last
_LONGEST_ADDRESS_S = 7 * 24 * 3600  # the longest life that Signature Version 4 allows
_MOST_PAGE_KEYS = 1000  # S3's page


@dataclass(frozen=True)
class S3Settings:
    """Limits of an S3 store.

    connections: requests at a time, of all threads together. connect_s, stall_s: longest waits in seconds, for the
    connection and for the next bytes. total_s: longest time of one read. attempts: of each request, in all.
    multipart_bytes: larger objects are uploaded in parts, of at least part_bytes.
    address_s: life of a presigned address; addresses: how many are remembered. page_keys: of a listing.
    """

    connections: int = 32
    connect_s: float = 5.0
    stall_s: float = 30.0
    total_s: float = 600.0
    attempts: int = 3
    multipart_bytes: int = 64 * _MIB
    part_bytes: int = 16 * _MIB
    address_s: int = 3600
    addresses: int = 65_536
    page_keys: int = _MOST_PAGE_KEYS

    def __post_init__(self) -> None:
        """Refuse what no S3 server takes."""
        least = min(self.connections, self.attempts, self.multipart_bytes, self.addresses)
        if least < 1 or min(self.connect_s, self.stall_s, self.total_s) <= 0:
            msg = "an S3 store's limits and waits must be positive"
            raise ArgumentError(msg)
        if self.part_bytes < _LEAST_PART_BYTES:
            msg = f"parts of an S3 upload have at least {_LEAST_PART_BYTES} bytes, got {self.part_bytes}"
            raise ArgumentError(msg)
        if not 1 <= self.address_s <= _LONGEST_ADDRESS_S or not 1 <= self.page_keys <= _MOST_PAGE_KEYS:
            msg = f"S3 addresses live 1 to {_LONGEST_ADDRESS_S} s, and its pages hold 1 to {_MOST_PAGE_KEYS} keys"
            raise ArgumentError(msg)
