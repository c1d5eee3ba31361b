"""A sample of a corpus to fit its profile on, over all sources and lengths."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from kvwire.runtime.calibrate import HELD_OUT
from kvwire.runtime.coding import CALIBRATION_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvwire.offline.refs import DocumentRef
    from kvwire.runtime.coding import Document

SMALL = 8
"""Bytes per token of the sample: smaller corpora are used whole, in order."""
SHARE = 8
"""One document gives at most an eighth of the sample's tokens, so that a long one does not fill it."""


def stratified(refs: Sequence[DocumentRef]) -> list[DocumentRef]:
    """Order documents so that any first few cover all sources and lengths.

    A stratum is a source's folder, file or bucket and a power of two of bytes. Documents of each are taken evenly: the
    middle first, then the quarters, and so on. The same documents give the same order.
    """
    strata: dict[tuple[str, int], list[DocumentRef]] = {}
    for ref in refs:
        place = ref.source if ref.kind != "text" else str(PurePosixPath(ref.source).parent)
        strata.setdefault((place, ref.size.bit_length()), []).append(ref)
    spread = ([group[at] for at in _spread(len(group))] for _, group in sorted(strata.items()))
    return [ref for turn in zip_longest(*spread) for ref in turn if ref is not None]


def _spread(size: int) -> list[int]:
    """0 to ``size``, exclusive, in bit-reversed order, so that any beginning is spread out."""
    bits = max(1, (size - 1).bit_length())
    return sorted(range(size), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))


def sample(
    refs: Sequence[DocumentRef],
    read: Callable[[DocumentRef], Document | None],
    tokens: int = CALIBRATION_TOKENS,
) -> list[Document]:
    """Choose text to fit a profile on."""
    whole = [ref for ref in refs if not ref.problem]
    if sum(ref.size for ref in whole) <= SMALL * tokens:
        return [document for ref in whole if (document := read(ref)) is not None]
    most_of_one = max(tokens // SHARE, -(-2 * tokens // len(whole)))
    return _enough((document for ref in stratified(whole) if (document := read(ref)) is not None), tokens, most_of_one)


def _enough(documents: Iterable[Document], wanted: int, most_of_one: int) -> list[Document]:
    from kvwire.runtime.coding import Document

    chosen: list[Document] = []
    tokens = behind = 0
    for document in documents:
        part = document.token_ids[:most_of_one]
        chosen.append(Document(document.document_id, part))
        behind += tokens >= wanted
        tokens += len(part)
        if behind >= HELD_OUT and tokens >= 2 * wanted:
            break
    return chosen
