"""Prefix entries of documents that are in the catalog already: their texts say all that is needed, no model runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, FormatVersionError, NotFoundError
from kvwire.store.donors import DONORS, DonorIndex
from kvwire.store.prefix.index import PrefixIndex, opening_of
from kvwire.store.upkeep.walk import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.keys import KeySpace

    OnProgress = Callable[[int], None]


@dataclass(frozen=True)
class Indexed(Report):
    """What was indexed.

    Attributes:
        documents: Whose entries were written.
        entries: Of prefixes that were written.
        left_out: Documents that are kept as text, or were computed behind a neutral prefix: no entry leads to them.
        failures: Documents whose entry or text cannot be read, in words.
    """

    documents: int = 0
    entries: int = 0
    left_out: int = 0
    failures: tuple[str, ...] = ()


def index_documents(
    catalog: Catalog, space: KeySpace, schemes: Sequence[str], on_progress: OnProgress | None = None
) -> Indexed:
    """Write the index entries of all documents of a model configuration, those that are there already included.

    Args:
        catalog: Of the tenant.
        space: The model configuration.
        schemes: Ways of hashing prompts, as ``hash_scheme`` takes them, and ``donors``.
        on_progress: Called with the tokens of each document.

    Returns:
        What was indexed.

    Raises:
        ArgumentError: There is no such scheme.
        StorageError: The store fails.
    """
    indexes = [
        DonorIndex(catalog, space) if scheme == DONORS else PrefixIndex(catalog, space, scheme) for scheme in schemes
    ]
    failures: list[str] = []
    done = Indexed()
    for document in catalog.documents(space, lambda key, error: failures.append(f"{key}: {error}")):
        try:
            info = None if document.is_text else catalog.blobs.header(document)
            if info is None or len(info.neutral_prefix) > info.opening:
                done = replace(done, left_out=done.left_out + 1)
                continue
            token_ids = catalog.texts.of(space, document)
        except (CorruptError, FormatVersionError, NotFoundError) as error:
            failures.append(f"{document.document_id}: {error}")
            continue
        written = sum(index.write(document, token_ids, opening_of(info)) for index in indexes)
        done = replace(done, documents=done.documents + 1, entries=done.entries + written)
        if on_progress:
            on_progress(len(token_ids))
    return replace(done, failures=tuple(failures))
