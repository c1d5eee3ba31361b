"""Layouts of published methods, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvwire.errors import ArgumentError
from kvwire.reuse.layout import MAX_SOFT_TOKENS, Anchors, LinkLayout, soft_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLAIN = LinkLayout()
"""Documents one after the other, without markers: K = 0."""
KVLINK_FIRST, KVLINK_START, KVLINK_END = 128011, 128254, 128255
"""Reserved ids of Llama-3's vocabulary that KVLink's checkpoints use: the first link token, and the markers."""
KVLINK_DOCUMENTS = 40
_USER = (128006, 882, 128007, 271)  # <|start_header_id|>user<|end_header_id|> and a blank line
_ASSISTANT = (128009, 128006, 78191, 128007, 271)  # <|eot_id|> and the header of an assistant's turn

Chat = Literal["", "training", "evaluation"]


def kvlink(count: int = 5, *, chat: Chat = "", stride: int | None = None) -> LinkLayout:
    """KVLink on Llama-3 checkpoints (arXiv 2502.16002): link tokens are reserved ids, by document number.

    Link token j of document i is 128011 + ``stride`` i + j. ``count`` 0 keeps the markers.

    Args:
        count: K, the link tokens after each document.
        chat: Adds Llama-3's turns. ``training``: documents end the system's turn, the question is in the user's.
            ``evaluation``: the user's turn begins before the documents. Empty: texts bring their own.
        stride: Distance between the ids of neighbouring documents; None: ``count``, as in the public checkpoints.

    Returns:
        The layout.

    Raises:
        ArgumentError: The ids reach the markers' ids, or there is no such chat.
    """
    step = count if stride is None else stride
    if count < 0 or step < count or KVLINK_FIRST + step * KVLINK_DOCUMENTS > KVLINK_START:
        most = (KVLINK_START - KVLINK_FIRST) // KVLINK_DOCUMENTS
        msg = f"KVLink's checkpoints have ids for 0 to {most} link tokens a document, got {count} with stride {step}"
        raise ArgumentError(msg)
    if chat not in {"", "training", "evaluation"}:
        raise ArgumentError(f"KVLink's chat is training or evaluation, got {chat!r}")
    firsts = range(KVLINK_FIRST, KVLINK_FIRST + step * KVLINK_DOCUMENTS, step) if count else ()
    return LinkLayout(
        name=":".join(["kvlink", str(count), *([chat] if chat else [])]),
        opening=(*(_USER if chat == "evaluation" else ()), KVLINK_START),
        links=tuple(tuple(range(first, first + count)) for first in firsts),
        closing=(KVLINK_END, *(_USER if chat == "training" else ())),
        ending=_ASSISTANT if chat else (),
    )


def soft_links(count: int, documents: int = KVLINK_DOCUMENTS) -> LinkLayout:
    """Link tokens that are trained embeddings, by document number: soft tokens 0, 1, ...

    Args:
        count: Link tokens after each document.
        documents: Number of documents that have link tokens.

    Returns:
        The layout; the soft tokens of document i begin at ``count`` i.

    Raises:
        ArgumentError: A number is below 1, or they exceed a file of soft tokens.
    """
    _check_counts(count, documents)
    tokens = _soft_tokens(count * documents)
    links = tuple(tokens[at : at + count] for at in range(0, len(tokens), count))
    suffix = "" if documents == KVLINK_DOCUMENTS else f"/{documents}"
    return LinkLayout(name=f"links:{count}{suffix}", links=links)


def wrappers(header: int = 8, trailer: int = 8) -> LinkLayout:
    """Trained embeddings inside each document's cache, as KV Packet has them (arXiv 2604.13226).

    Args:
        header: Soft tokens 0, 1, ... before a document's own tokens.
        trailer: Soft tokens after them, numbered on.

    Returns:
        The layout.

    Raises:
        ArgumentError: Both are 0, or they exceed a file of soft tokens.
    """
    if min(header, trailer) < 0 or not header + trailer:
        raise ArgumentError(f"documents are wrapped with at least one token, got {header} before and {trailer} after")
    tokens = _soft_tokens(header + trailer)
    return LinkLayout(name=f"wrappers:{header}+{trailer}", before=tokens[:header], after=tokens[header:])


def turborag(before: Sequence[int], after: Sequence[int]) -> LinkLayout:
    """TurboRAG (arXiv 2410.07590): boundary tokens inside each document's cache.

    Args:
        before: Token ids of ``<|doc_start|>`` in the checkpoint's vocabulary.
        after: Token ids of ``<|doc_end|>``.

    Returns:
        The layout.
    """
    return LinkLayout(name="turborag", before=tuple(before), after=tuple(after))


def block_attention(prefix: Sequence[int]) -> LinkLayout:
    """Block-Attention (arXiv 2409.15355): a prefix tells the model that documents do not see each other.

    Args:
        prefix: Token ids; computed in every prompt, after the system text.

    Returns:
        The layout.
    """
    return LinkLayout(name="block-attention", opening=tuple(prefix))


def anchors(chunk: int = 100, count: int = 25) -> LinkLayout:
    """KVLink's compression (arXiv 2502.16002, section 2.4): only the anchors of each chunk are stored.

    Args:
        chunk: Own tokens of a document in each chunk.
        count: Soft tokens 0, 1, ... after each chunk.

    Returns:
        The layout.

    Raises:
        ArgumentError: A number is below 1, or they exceed a file of soft tokens.
    """
    return LinkLayout(name=f"anchors:{chunk}/{count}", anchors=Anchors(chunk, _soft_tokens(count)))


def _soft_tokens(count: int) -> tuple[int, ...]:
    if count > MAX_SOFT_TOKENS:
        raise ArgumentError(f"a layout takes at most {MAX_SOFT_TOKENS} soft tokens, got {count}; take fewer")
    return tuple(soft_token(index) for index in range(count))


def _check_counts(count: int, documents: int) -> None:
    if min(count, documents) < 1:
        raise ArgumentError(f"links need at least one token after at least one document, got {count} after {documents}")


def _soft_links(text: str) -> LinkLayout:
    return soft_links(*_two(text, "/")) if "/" in text else soft_links(int(text))


def _two(text: str, between: str) -> tuple[int, int]:
    first, _, second = text.partition(between)
    return int(first), int(second)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(",") if each)


def _turborag(text: str) -> LinkLayout:
    before, _, after = text.partition("/")
    return turborag(_ids(before), _ids(after))


def _kvlink(text: str) -> LinkLayout:
    count, _, chat = text.partition(":")
    return kvlink(int(count or "5"), chat=chat)  # type: ignore[arg-type] # kvlink refuses what is none


_PRESETS: dict[str, tuple[str, Callable[[str], LinkLayout]]] = {
    "plain": ("plain", lambda _: PLAIN),
    "kvlink": ("kvlink:K or kvlink:K:evaluation", _kvlink),
    "links": ("links:K or links:K/DOCUMENTS", _soft_links),
    "wrappers": ("wrappers:HEADER+TRAILER", lambda text: wrappers(*_two(text, "+"))),
    "turborag": ("turborag:START_IDS/END_IDS", _turborag),
    "block-attention": ("block-attention:PREFIX_IDS", lambda text: block_attention(_ids(text))),
    "anchors": ("anchors:CHUNK/ANCHORS", lambda text: anchors(*_two(text, "/"))),
}


def read_layout(name: str) -> LinkLayout:
    """Parse a layout's name, such as ``kvlink:5`` or ``wrappers:8+8``.

    Args:
        name: A preset and its numbers; token ids are separated by commas.

    Returns:
        The layout; its own name parses back to it, unless the preset takes token ids.

    Raises:
        ArgumentError: There is no such preset, or its numbers are invalid.
    """
    preset, _, figures = name.partition(":")
    form, make = _PRESETS.get(preset, ("", None))
    try:
        if make is not None:
            return make(figures)
    except ArgumentError:
        raise
    except ValueError:
        raise ArgumentError(f"the layout {name!r} is not of the form {form}") from None
    raise ArgumentError(f"there is no layout {name!r}; there are {', '.join(form for form, _ in _PRESETS.values())}")
