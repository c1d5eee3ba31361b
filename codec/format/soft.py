"""Which soft tokens a document has, as its blob's metadata names them."""

from __future__ import annotations

import re
from typing import Any

from kvwire.errors import ArgumentError
from kvwire.types import SoftTokensName

MAX_SOFT = 4096
"""Soft tokens of one file."""
_DIGEST = re.compile("[0-9a-f]{64}")


def soft_to_json(soft: SoftTokensName) -> list[Any]:
    """Write down which soft tokens a document has."""
    raw = [soft.digest, soft.first, soft.count]
    try:
        soft_from_json(raw)
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    return raw


def soft_from_json(raw: Any) -> SoftTokensName:  # noqa: ANN401 - JSON
    """Read which soft tokens a document has."""
    sound = isinstance(raw, list) and [type(each) for each in raw] == [str, int, int]
    if not sound or not _DIGEST.fullmatch(raw[0]) or not 0 < raw[2] <= MAX_SOFT or not 0 < raw[1] <= (1 << 32) - raw[2]:
        msg = f"soft tokens are named by a SHA-256, their first id and their number, at most {MAX_SOFT}"
        raise ValueError(msg)
    return SoftTokensName(*raw)
