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

    Attributes:
        connections: Requests at a time, of all threads together.
        connect_s: Longest wait for the connection, in seconds.
        stall_s: Longest wait for the next bytes, in seconds.
        total_s: Longest time of one read.
        attempts: Of each request, in all.
        multipart_bytes: Larger objects are uploaded in parts.
        part_bytes: Least size of a part.
        address_s: Life of a presigned address, in seconds.
        addresses: How many are remembered.
        page_keys: Keys of one page of a listing.
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
