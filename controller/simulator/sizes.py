"""Documents with real segment sizes: those of the demonstration's documents, brought to other lengths and models.

``segment_sizes.json`` holds what benchmarks/segment_sizes.py measured with the real codec: bits for each element and
error of every chunk and level. Here a model's chunk takes the rate of a measured one. That assumes that the
demonstration's small model is as hard to code, element for element, as the other: true for itself alone, and a stand-in
elsewhere. Real blobs of a model go in through ``DocumentPlanInput.from_blob`` instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from kvwire.controller.documents import DocumentPlanInput
from kvwire.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.controller.simulator.models import Model

CHUNK_TOKENS = 256


@dataclass(frozen=True)
class ChunkRates:
    """One measured chunk.

    Attributes:
        bits: For each element that are fetched, by level.
        errors: By level.
    """

    bits: tuple[float, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class MethodRates:
    """One way of coding.

    Attributes:
        levels: Their names.
        layered: A finer level adds to the coarser ones.
        prefix_share: Share of the forward pass that a reader computes before decoding.
        firsts: Chunks at the beginning of a document; whole ones only.
        others: Chunks behind the first; whole ones only.
    """

    levels: tuple[str, ...]
    layered: bool
    prefix_share: float
    firsts: tuple[ChunkRates, ...]
    others: tuple[ChunkRates, ...]


@cache
def measured() -> dict[str, MethodRates]:
    """The measured methods by name: ``kvwire``, ``kvwire-head-start-1``, ``kvwire-head-start-2``, ``cachegen``."""
    text = resources.files(__package__).joinpath("segment_sizes.json").read_text(encoding="utf-8")
    return {name: _method(entry) for name, entry in json.loads(text)["results"].items()}


def documents_for(
    model: Model, lengths: Sequence[int], *, method: str = "kvwire", seed: int = 0
) -> list[DocumentPlanInput]:
    """Documents of these lengths, in tokens, as a model's caches would be encoded, in chunks of 256 tokens.

    Each chunk takes bits and errors of a measured one, drawn at random: a document's first chunk of a first one, the
    others of the others. The same seed gives the same documents.

    Args:
        model: Shape of the model.
        lengths: Tokens of each document.
        method: How they are coded, one of ``measured``.
        seed: Of what is drawn.

    Returns:
        The documents as planning takes them.

    Raises:
        NotFoundError: There is no such method.
    """
    if method not in measured():
        msg = f"no sizes are known of method {method!r}; choose one of {', '.join(measured())}"
        raise NotFoundError(msg)
    rates, rng = measured()[method], np.random.default_rng(seed)
    documents = []
    for length in lengths:
        tokens = chunk_lengths(length)
        drawn = [_draw(rates.others if index else rates.firsts, rng) for index in range(len(tokens))]
        documents.append(
            DocumentPlanInput(
                tokens=tokens,
                fetch_bytes=tuple(
                    _sizes(chunk, count * model.cache_elements) for chunk, count in zip(drawn, tokens, strict=True)
                ),
                errors=tuple(chunk.errors for chunk in drawn),
                layered=rates.layered,
                prefix_share=rates.prefix_share,
            )
        )
    return documents


def raw_documents_for(model: Model, lengths: Sequence[int]) -> list[DocumentPlanInput]:
    """Make the same documents as plain bfloat16; ``costs(..., raw=True)`` decodes them by copying.

    Args:
        model: Shape of the model.
        lengths: Tokens of each document.

    Returns:
        Documents of one level without error.
    """
    return [raw_of(model, DocumentPlanInput(tokens=chunk_lengths(length))) for length in lengths]


def raw_of(model: Model, document: DocumentPlanInput) -> DocumentPlanInput:
    """Make a document plain bfloat16.

    Args:
        model: Shape of the model.
        document: As it was coded.

    Returns:
        The document, counting with the same error as when it is recomputed: its finest, or 0.
    """
    return DocumentPlanInput(
        tokens=document.tokens,
        fetch_bytes=tuple((count * model.cache_bytes,) for count in document.tokens),
        has_text=document.has_text,
        errors=tuple((document.error(chunk, None),) for chunk in range(len(document.tokens))),
    )


def chunk_lengths(tokens: int) -> tuple[int, ...]:
    """Tokens of each chunk of a document; all but the last have 256."""
    if tokens < 1:
        msg = f"a document needs at least one token, got {tokens}"
        raise ArgumentError(msg)
    whole, rest = divmod(tokens, CHUNK_TOKENS)
    return (CHUNK_TOKENS,) * whole + ((rest,) if rest else ())


def _draw(chunks: Sequence[ChunkRates], rng: np.random.Generator) -> ChunkRates:
    return chunks[int(rng.integers(len(chunks)))]


def _sizes(chunk: ChunkRates, elements: int) -> tuple[int, ...]:
    return tuple(ceil(bits * elements / 8) for bits in chunk.bits)


def _method(entry: Any) -> MethodRates:  # noqa: ANN401 - the package's own file
    chunks = [document["chunks"] for document in entry["documents"]]
    return MethodRates(
        levels=tuple(entry["levels"]),
        layered=entry["layered"],
        prefix_share=entry["head_start"],
        firsts=_whole([rows[0] for rows in chunks]),
        others=_whole([chunk for rows in chunks for chunk in rows[1:]]),
    )


def _whole(chunks: list[Any]) -> tuple[ChunkRates, ...]:
    return tuple(
        ChunkRates(tuple(chunk["bits_per_element"]), tuple(chunk["errors"]))
        for chunk in chunks
        if chunk["tokens"] == CHUNK_TOKENS
    )
