"""Documents with the segment sizes of measured ones, brought to other lengths and models.

``segment_sizes.json`` holds what benchmarks/segment_sizes.py measured with the real codec on the demonstration's model
and documents: bits for each element and error of every chunk and level. Those are the sizes of that model alone: it is
small and easily coded. Every other model's chunks take them with each level's bits brought to ``BITS``, the means of a
real language model. How hard a model is that nobody has measured is not known: real blobs go in through
``DocumentPlanInput.from_blob`` instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from kvwire.errors import ArgumentError, NotFoundError

from ..documents import DocumentPlanInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .models import Model

CHUNK_TOKENS = 256
BITS = {
    "kvwire": (0.126, 0.458, 1.157, 2.293, 3.743),
    "kvwire-head-start-1": (0.109, 0.394, 1.045, 2.132, 3.481),
    "kvwire-head-start-2": (0.058, 0.281, 0.818, 1.810, 3.203),
}
"""Bits for each element by level of SmolLM2-135M-Instruct: means over a novel, an encyclopaedia and question sets,
1,024-token contexts (benchmarks/results/real_model.json). With one and two layers that the reader computes: the share
that a 12-layer model of web text left of its bits. CacheGen's bits hardly depend on the model (2.5 for SmolLM2,
2.6 for the demonstration's), so they stay, as do errors: equal steps leave about equal errors."""
KL = (6.2e-2, 1.17e-2, 1.92e-3, 2.95e-4, 7.04e-5)
"""The KL divergences of the levels of ``kvwire``, in nats, of the same model and texts."""
_SOURCES = {
    "demo": "sizes measured on the demonstration's model and documents",
    "SmolLM2": "bits and KL of SmolLM2-135M-Instruct, errors of the demonstration's model; only your blobs tell yours",
}


@dataclass(frozen=True)
class ChunkRates:
    """One measured chunk."""

    bits: tuple[float, ...]  # for each element that are fetched, by level
    errors: tuple[float, ...]  # by level


@dataclass(frozen=True)
class MethodRates:
    """One way of coding."""

    levels: tuple[str, ...]  # their names
    layered: bool  # A finer level adds to the coarser ones
    prefix_share: float  # share of the forward pass that a reader computes before decoding
    firsts: tuple[ChunkRates, ...]  # chunks at the beginning of a document; whole ones only
    others: tuple[ChunkRates, ...]  # chunks behind the first; whole ones only


@cache
def measured() -> dict[str, MethodRates]:
    """The measured methods by name: ``kvwire``, ``kvwire-head-start-1``, ``kvwire-head-start-2``, ``cachegen``."""
    text = resources.files(__package__).joinpath("segment_sizes.json").read_text(encoding="utf-8")
    return {name: _method(entry) for name, entry in json.loads(text)["results"].items()}


def documents_for(
    model: Model, lengths: Sequence[int], *, method: str = "kvwire", seed: int = 0, max_kl: float | None = None
) -> list[DocumentPlanInput]:
    """Documents of these lengths, in tokens, as a model's caches would be encoded, in chunks of 256 tokens.

    Each chunk takes bits and errors of a measured one, drawn at random: a document's first chunk of a first one, the
    others of the others; for other models than the demonstration's their bits follow ``BITS``. The same seed gives
    the same documents.

    Args:
        model: Shape of the model.
        lengths: Tokens of each document.
        method: How they are coded, one of ``measured``.
        seed: Of what is drawn.
        max_kl: Nats: the documents' floor is the coarsest level with no greater KL divergence, as ``expected_kl`` has
            it, or the finest; None: they have no floor.

    Returns:
        The documents as planning takes them.

    Raises:
        NotFoundError: There is no such method.
    """
    if method not in measured():
        raise NotFoundError(f"no sizes are known of method {method!r}; choose one of {', '.join(measured())}")
    rates, rng = measured()[method], np.random.default_rng(seed)
    factors = _factors(method, rates) if source_of(model) == "SmolLM2" else (1.0,) * len(rates.levels)
    known = expected_kl(model, method)
    floor = 0
    if known and max_kl is not None:
        floor = next((level for level, kl in enumerate(known) if kl <= max_kl), len(known) - 1)
    documents = []
    for length in lengths:
        tokens = chunk_lengths(length)
        drawn = [_draw(rates.others if index else rates.firsts, rng) for index in range(len(tokens))]
        documents.append(
            DocumentPlanInput(
                tokens=tokens,
                fetch_bytes=tuple(
                    _sizes(chunk, factors, count * model.cache_elements)
                    for chunk, count in zip(drawn, tokens, strict=True)
                ),
                errors=tuple(chunk.errors for chunk in drawn),
                layered=rates.layered,
                prefix_share=rates.prefix_share,
                floor=floor,
            )
        )
    return documents


def expected_kl(model: Model, method: str = "kvwire") -> tuple[float, ...]:
    """KL divergence of each level in nats, where that was measured with the sizes; empty where it was not.

    Args:
        model: Shape of the model.
        method: How documents are coded, one of ``measured``.
    """
    return KL if source_of(model) == "SmolLM2" and method == "kvwire" else ()


def source_of(model: Model) -> str:
    """Name of the measured model whose sizes a model's documents take: ``demo`` or ``SmolLM2``."""
    return "demo" if model.name == "demo" else "SmolLM2"


def source_in_words(model: Model, methods: Sequence[str] = ("kvwire",)) -> str:
    """The same, to be shown beside every figure that follows from it."""
    words = _SOURCES[source_of(model)]
    as_they_are = [method for method in methods if method not in BITS]
    if source_of(model) == "demo" or not as_they_are:
        return words
    return f"{words}; {', '.join(as_they_are)}: {_SOURCES['demo']}"


def _factors(method: str, rates: MethodRates) -> tuple[float, ...]:
    """What each level's bits are multiplied by, so that the mean chunk has those of ``BITS``."""
    if method not in BITS:
        return (1.0,) * len(rates.levels)
    means = np.mean([chunk.bits for chunk in rates.others], axis=0)
    return tuple(float(wanted / mean) for wanted, mean in zip(BITS[method], means, strict=True))


def raw_of(model: Model, document: DocumentPlanInput) -> DocumentPlanInput:
    """Make a document plain bfloat16; ``costs(..., raw=True)`` decodes it by copying.

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
        raise ArgumentError(f"a document needs at least one token, got {tokens}")
    whole, rest = divmod(tokens, CHUNK_TOKENS)
    return (CHUNK_TOKENS,) * whole + ((rest,) if rest else ())


def _draw(chunks: Sequence[ChunkRates], rng: np.random.Generator) -> ChunkRates:
    return chunks[int(rng.integers(len(chunks)))]


def _sizes(chunk: ChunkRates, factors: Sequence[float], elements: int) -> tuple[int, ...]:
    return tuple(ceil(bits * factor * elements / 8) for bits, factor in zip(chunk.bits, factors, strict=True))


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
