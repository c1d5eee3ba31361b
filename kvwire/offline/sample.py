"""The text that a corpus's profile is fitted on: of every source and of every length."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from kvwire.runtime.calibration import CALIBRATION_TOKENS, HELD_OUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvwire.offline.refs import DocumentRef
    from kvwire.runtime.coding import Document

SMALL_BYTES = 8 * CALIBRATION_TOKENS
"""A corpus of no more text is fitted on as it is, in its order."""
MOST_OF_ONE = CALIBRATION_TOKENS // 8
"""Tokens of one document, so that no long one is all of the sample."""


def stratified(refs: Sequence[DocumentRef]) -> list[DocumentRef]:
    """Order documents so that any first few hold every source and every length.

    A stratum is a source's folder, file or bucket and a power of two of bytes. Documents of each are taken evenly over
    its order: the middle first, then the quarters, and so on. The same documents give the same order.

    Args:
        refs: The documents.

    Returns:
        All of them: of each stratum one, then of each another one.
    """
    strata: dict[tuple[str, int], list[DocumentRef]] = {}
    for ref in refs:
        place = ref.source if ref.kind != "text" else str(PurePosixPath(ref.source).parent)
        strata.setdefault((place, ref.size.bit_length()), []).append(ref)
    spread = ([group[at] for at in _spread(len(group))] for _, group in sorted(strata.items()))
    return [ref for turn in zip_longest(*spread) for ref in turn if ref is not None]


def _spread(size: int) -> list[int]:
    """0 to ``size``, exclusive, each once, in an order whose beginnings are spread: by the reversed bits."""
    bits = max(1, (size - 1).bit_length())
    return sorted(range(size), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))


def sample(refs: Sequence[DocumentRef], read: Callable[[DocumentRef], Document | None]) -> list[Document]:
    """Choose text to fit a profile on.

    Args:
        refs: The documents of the corpus.
        read: Gives a document's tokens, which may be cut anywhere; None where it cannot be encoded.

    Returns:
        All documents of a small corpus; else tokens enough to fit on, and the texts behind them to measure errors on.
    """
    whole = [ref for ref in refs if not ref.problem]
    if sum(ref.size for ref in whole) <= SMALL_BYTES:
        return [document for ref in whole if (document := read(ref)) is not None]
    return _enough(document for ref in stratified(whole) if (document := read(ref)) is not None)


def _enough(documents: Iterable[Document]) -> list[Document]:
    from kvwire.runtime.coding import Document

    chosen: list[Document] = []
    tokens = behind = 0
    for document in documents:
        part = document.token_ids[:MOST_OF_ONE]
        chosen.append(Document(document.document_id, part))
        behind += tokens >= CALIBRATION_TOKENS
        tokens += len(part)
        if behind == HELD_OUT:
            break
    return chosen
