"""Abuse: index entries that share bytes, leave gaps, point into the header or past the end.

Mitigation: entries must follow each other in payload order, from the header's end to the file's.
"""

from __future__ import annotations

import pytest

from .. import surgery as cut
from .abuse import refused_by_head


@pytest.mark.parametrize("cell", [0, 1, 5, 11])
@pytest.mark.parametrize("target", ["start", "head", "first", "previous", "middle", "end", "beyond", "missing"])
def test_offsets(blob, cell, target):
    head, size = cut.get(blob, cut.BLOB_FIELDS, "head_bytes"), len(blob)
    own = cut.get(blob, cut.ENTRY_FIELDS, "offset", cut.index_at(blob) + 32 * cell)
    places = {"start": 0, "head": head - 64, "first": head, "previous": own - 1, "middle": own + 1}
    places |= {"end": size, "beyond": 2**63, "missing": 2**64 - 1}
    if places[target] != own and not (target == "missing" and cell in {3, 7, 11}):
        refused_by_head(cut.entry(blob, cell, "offset", places[target]), match="lies where|lacks a level|add up")


def test_every_entry_on_the_same_bytes(blob):
    for cell in range(12):
        blob = cut.entry(blob, cell, "offset", cut.get(blob, cut.BLOB_FIELDS, "head_bytes"))
    refused_by_head(blob, match="lies where it cannot")


def test_lengths_that_wrap_around(blob):
    for cell in (0, 11):
        refused_by_head(cut.entry(blob, cell, "stored", 2**32 - 1), match="lies where it cannot")
