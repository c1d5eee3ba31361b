"""The names in a blob's header, for stores: nothing else is parsed, and torch stays out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.codec.format.header import MAGIC, PROLOGUE
from kvwire.codec.format.metadata_json import unpack_json
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterator

_STORED_AT, _RAW_AT = 8, 9
"""Lengths of the metadata, among the fields of the prologue."""


def header_names(blob: bytes) -> Iterator[str]:
    """Every text in a blob's metadata: of model, revision and levels among them."""
    if not blob.startswith(MAGIC) or len(blob) < PROLOGUE.size:
        return
    fields = PROLOGUE.unpack_from(blob)
    stored = blob[PROLOGUE.size : PROLOGUE.size + fields[_STORED_AT]]
    try:
        values: list[object] = [unpack_json(stored, fields[_RAW_AT], "blob")]
    except CorruptError:
        return
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value
