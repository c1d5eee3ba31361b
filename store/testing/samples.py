"""Objects that every store takes, a server that checks what it is sent included."""

from __future__ import annotations

import hashlib
import random

from kvwire.store import CatalogEntry, KeySpace, tenant_hash

SPACE = KeySpace.of(tenant_hash("conformance"), "0" * 64)

BAD_KEYS = (
    "",
    "/",
    "/etc/passwd",
    "..",
    "../secret",
    "a/../b",
    "a//b",
    "a/",
    ".hidden",
    "a/.tmp-1-2",
    "a\\b",
    "a b",
    "a\0b",
    "a\n",
    "a%2fb",
    "a%20b",
    "a#b",
    "a&b",
    "ä",
    "a?b",
    "x" * 201,
    "/".join(["x" * 100] * 6),
    "C:/x",
)
BAD_PREFIXES = ("/", "..", "a/../b", ".", "a//", "a/.t", "a*", "a%", "a b")

ODD_KEYS = (
    "a+b",
    "a@b",
    "a=b",
    "a~b",
    "-a",
    "a.b.",
    "~a/+b/=c/@d",
    "a...b",
    "x" * 200,
    "/".join(["y" * 127] * 4),
)
"""Proper keys at the edges of what is one, the longest part and the longest key included."""


def noise(size: int, seed: int = 0) -> bytes:
    """Incompressible bytes; the same for the same arguments."""
    return random.Random(seed).randbytes(size)  # noqa: S311 - test data


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def blob(seed: int, size: int = 1000) -> tuple[str, bytes]:
    """A content-addressed key and its bytes."""
    data = noise(size, seed)
    return SPACE.blob(digest(data)), data


def catalog_entry(document_id: str, seed: int = 0, levels: int = 1) -> tuple[str, bytes]:
    """A catalog key and an entry that belongs to it."""
    key, data = blob(seed)
    entry = CatalogEntry(
        document_id=document_id,
        blob_key=key,
        sha256=digest(data),
        size=len(data),
        header_bytes=10,
        tokens=7,
        token_digest="",
        profile_digest="",
        levels=tuple((f"level {number}", len(data)) for number in range(levels)),
    )
    return SPACE.document(document_id), entry.to_json()
