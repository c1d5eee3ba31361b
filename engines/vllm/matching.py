"""What of a prompt can be loaded: its documents, or the longest prefix that the corpus's index knows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError
from kvwire.store.prefix.index import after_opening, opening_of
from kvwire.types import digest_tokens

from .requests import current_profile_digest, entries_of, kept_of, missing_level, no_head, salt_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry, KeptRepair, PrefixIndex

    from .quality import LinkQuality
    from .requests import Choice


_UNREPAIRED = (
    "no repair of these documents in this order is kept that fits the level: what follows the first is computed; let "
    "kvwire ask --keep-repairs compute one"
)


_NO_OPENING = "the store lacks the rows of the BOS in front"
_AGAIN = "run kvwire encode again; it is computed"


@dataclass(frozen=True)
class Piece:
    """A document whose beginning, or all of it, stands in a prompt."""

    document_id: str  # its name
    token_ids: tuple[int, ...]  # its whole text
    tokens: int  # how many of its first tokens stand in the prompt


@dataclass(frozen=True)
class MatchResult:
    """What of a prompt can be loaded."""

    salt: str  # the ``cache_salt`` that the request needs for that
    # from the prompt's first token on, one after the other; all but the last are whole documents
    pieces: tuple[Piece, ...]
    trouble: str = ""  # why it is not more, in words; empty where nothing went wrong
    kept: KeptRepair | None = None  # repaired rows to be laid over the pieces, all of which it names; None: none
    is_other_text: bool = False  # the prompt has other text than the salt names, and what agrees of it is not loaded
    refused: str = ""  # why the request cannot be served as asked, in words
    lacks_head: bool = False  # the store lacks the rows of what stands before the documents
    # of linked documents that nothing repairs, from full prefill, as it was measured; None: it was not
    expected_kl: float | None = None
    context: int | None = None  # the level that rows of the pieces were computed over; None: none was lossy
    front: int = 0  # how many first pieces stand before the documents that the request names


def match_documents(
    corpus: Corpus, choice: Choice, prompt: Sequence[int], quality: LinkQuality | None = None
) -> MatchResult:
    """The documents that a request names, as far as the prompt begins with them and the catalog has their blobs."""
    entries = entries_of(corpus, choice.documents)
    kept = kept_of(corpus, choice, entries, prompt)
    salt = salt_of(choice, corpus.catalog.tenant, corpus.meta.config_digest(), entries, kept=kept)
    if missing := missing_level(entries, choice.level):
        return MatchResult(salt, (), refused=missing)
    front, trouble = _before_documents(corpus, choice, entries[0], prompt)
    if trouble:
        return MatchResult(salt, (), trouble, is_other_text=True, lacks_head=choice.head > 0)
    pieces = list(front)
    position = sum(piece.tokens for piece in pieces)
    is_other = False
    for name, entry in zip(choice.documents, entries, strict=True):
        if entry is None or entry.is_text:
            where = "is not in the catalog" if entry is None else "is stored as text alone"
            trouble = f"document {name!r} {where}: encode it; it is computed"
            break
        ids = tuple(prompt[position : position + entry.tokens])
        if digest_tokens(ids) != entry.token_digest:
            found = _beginning(corpus, entry, prompt[position:])
            is_other = found is None
            pieces += [found] if found and found.tokens else []
            trouble = (
                f"from token {position + (found.tokens if found else 0)} on the prompt is not the text of document "
                f"{name!r}: send the documents' token ids as they were encoded (kvwire.vllm.request_body); what "
                "follows is computed"
            )
            break
        pieces.append(Piece(name, ids, len(ids)))
        position += len(ids)
    repaired = len(kept.documents) if kept else 1
    if choice.repair and len(pieces) > repaired + len(front):
        trouble = f"a repair that fits is kept of the first {repaired} documents alone" if kept else _UNREPAIRED
        pieces = pieces[: repaired + len(front)]
    expected, linked = None, [entry for entry in entries[: len(pieces) - len(front)] if entry]
    if len(linked) > 1 and not choice.repair and quality is not None:
        level = linked[0].levels[choice.level][0] if choice.level is not None else ""
        expected, why = quality.of_links(linked, level)
        if why:
            pieces, trouble = pieces[: 1 + len(front)], why
    kept = kept if kept and len(pieces) == repaired + len(front) else None
    return MatchResult(salt, tuple(pieces), trouble, kept, is_other, expected_kl=expected, front=len(front))


def _before_documents(
    corpus: Corpus, choice: Choice, first: CatalogEntry | None, prompt: Sequence[int]
) -> tuple[tuple[Piece, ...], str]:
    """What stands before the documents: a chat's head or a BOS; or why its rows cannot be had, in words."""
    if choice.head:
        head = _opening_piece(corpus, tuple(prompt[: choice.head]))
        return ((head,), "") if head else ((), no_head(choice.head))
    if first is None or first.is_text or digest_tokens(prompt[: first.tokens]) == first.token_digest:
        return (), ""
    is_behind = digest_tokens(prompt[1 : 1 + first.tokens]) == first.token_digest
    if opening_of(corpus.read_header(first)) != tuple(prompt[:1]):
        return (), after_opening(prompt[0]) if is_behind else ""
    bos = _opening_piece(corpus, tuple(prompt[:1]))
    return ((bos,), "") if bos else ((), f"{_NO_OPENING} of document {first.document_id!r}: {_AGAIN}")


def _beginning(corpus: Corpus, entry: CatalogEntry, prompt: Sequence[int]) -> Piece | None:
    """As much of a document as a prompt begins with; None where its text is lost."""
    try:
        text = tuple(corpus.text(entry))
    except KvwireError:
        return None
    tokens = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False)))
    return Piece(entry.document_id, text, tokens)


def match_prefix(corpus: Corpus, index: PrefixIndex, choice: Choice, prompt: Sequence[int]) -> MatchResult:
    """The longest prefix of a prompt that a document begins with, but for the prompt's last token."""
    profile = current_profile_digest(corpus)
    salt = salt_of(choice, corpus.catalog.tenant, corpus.meta.config_digest(), (), profile)
    troubles: list[str] = []
    hit = index.longest(prompt, troubles.append)
    if hit is not None and hit.document.profile_digest != profile:
        troubles.append(f"document {hit.document.document_id!r} was encoded with another profile: encode it again")
        hit = None
    if hit is not None and hit.info.prefix_layers:
        troubles.append(f"document {hit.document.document_id!r} is coded for readers that run the model's first layers")
        hit = None
    if hit is not None and (missing := missing_level([hit.document], choice.level)):
        return MatchResult(salt, (), refused=missing)
    if hit is not None and hit.info.context_level is not None and hit.info.context_level < (choice.level or 0):
        troubles.append(f"rows of {hit.document.document_id!r} were computed over a coarser level: compact it")
        hit = None
    tokens = 0 if hit is None else min(hit.tokens, len(prompt) - 1)
    if hit is None or not tokens:
        return MatchResult(salt, (), "; ".join(troubles))
    front = _opening_piece(corpus, opening_of(hit.info))
    if front is None and hit.opening:
        troubles.append(f"{_NO_OPENING} of document {hit.document.document_id!r}: {_AGAIN}")
        return MatchResult(salt, (), "; ".join(troubles))
    name, ids, rest = hit.document.document_id, hit.token_ids[hit.opening :], tokens - hit.opening
    pieces = (*([front] if front else []), *([Piece(name, ids, rest)] if rest > 0 else []))
    return MatchResult(salt, pieces, "; ".join(troubles), context=hit.info.context_level)


def _opening_piece(corpus: Corpus, opening: tuple[int, ...]) -> Piece | None:
    """The document that holds the rows of a BOS; None where the store has none."""
    entry = corpus.catalog.by_tokens(corpus.meta.config_digest(), digest_tokens(opening)) if opening else None
    return None if entry is None or entry.is_text else Piece(entry.document_id, opening, len(opening))
