"""Order of a linked prompt: texts, tokens inside caches, computed tokens, and the attention mask.

Methods that link documents' caches differ only in the tokens around them: KVLink (arXiv 2502.16002) computes link
tokens behind each document, KV Packet (arXiv 2604.13226) stores trained tokens inside each cache, TurboRAG (arXiv
2410.07590) boundary tokens, Block-Attention (arXiv 2409.15355) begins prompts with a prefix. A token is a vocabulary id
or a soft token: a trained embedding, numbered by ``soft_token``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

SegmentKind = Literal["system", "opening", "document", "links", "closing", "question", "ending", "answer"]
MAX_SOFT_TOKENS = 4096
"""Most soft tokens of a file, and so of a layout."""


def soft_token(index: int) -> int:
    """Token id of a trained embedding.

    Args:
        index: Row of the embedding in its file, from 0.

    Returns:
        A negative number, unlike any vocabulary id: -1 for the first row.

    Raises:
        ArgumentError: The row is negative.
    """
    if index < 0:
        raise ArgumentError(f"soft tokens count from 0, got {index}")
    return -1 - index


@dataclass(frozen=True)
class Anchors:
    """Tokens stored in place of the chunk before them (KVLink, section 2.4).

    A chunk's tokens and anchors attend to their chunk and to earlier chunks' anchors.

    Attributes:
        chunk: A document's own tokens in each chunk; the last chunk may have fewer.
        tokens: The anchors after each chunk.
    """

    chunk: int
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse empty chunks."""
        if self.chunk < 1 or not self.tokens:
            raise ArgumentError(f"anchors need chunks of at least one token, got chunks of {self.chunk}: {self.tokens}")

    def length(self, tokens: int) -> int:
        """Length of a document of ``tokens`` own tokens with its anchors."""
        return tokens + len(self.tokens) * -(-tokens // self.chunk)

    def chunk_of(self, length: int) -> Tensor:
        """The chunk of each token, int64 ``[length]``."""
        return torch.arange(length) // (self.chunk + len(self.tokens))

    def is_anchor(self, length: int) -> Tensor:
        """Which tokens are anchors, bool ``[length]``."""
        at, count = torch.arange(length), len(self.tokens)
        return (at % (self.chunk + count) >= self.chunk) | (at >= length - count)

    def visible(self, length: int) -> Tensor:
        """Attention mask within such a document, bool ``[length, length]``."""
        chunk, at = self.chunk_of(length), torch.arange(length)
        mine = chunk[:, None] == chunk
        return (at <= at[:, None]) & (mine | self.is_anchor(length))

    def insert(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Insert anchors between a document's own tokens."""
        starts = range(0, len(token_ids), self.chunk)
        return tuple(token for at in starts for token in (*token_ids[at : at + self.chunk], *self.tokens))


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one kind.

    Attributes:
        kind: Role in the prompt.
        start: Position of the first.
        tokens: How many.
        token_ids: The tokens; None if only their number is known.
        document: Number of their document in the prompt; None if they belong to none.
    """

    kind: SegmentKind
    start: int
    tokens: int
    token_ids: tuple[int, ...] | None
    document: int | None = None

    @property
    def stop(self) -> int:
        """Position after the last."""
        return self.start + self.tokens

    @property
    def is_cached(self) -> bool:
        """Whether keys and values come from a document's cache, not computed in every prompt."""
        return self.kind == "document"


@dataclass(frozen=True)
class LinkLayout:
    """Tokens that a method puts around documents and into their caches.

    A prompt is: system text, ``opening``, then for each document its cache (``before``, its own tokens, ``after``) and
    its link tokens, then ``closing``, the question, ``ending``. Documents attend to themselves only; all other tokens
    to all before them.

    Attributes:
        name: Shown in reports.
        before: Tokens inside each cache, before the document's own.
        after: Tokens inside each cache, after the document's own.
        opening: Computed between the system text and the first document.
        links: Computed after each document, by its number in the prompt; empty: none, for any number of documents.
        closing: Computed between the last document's link tokens and the question.
        ending: Computed between the question and the answer.
        anchors: Stored in place of each document's own tokens; None: all tokens are stored.
    """

    name: str = "plain"
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
    links: tuple[tuple[int, ...], ...] = ()
    closing: tuple[int, ...] = ()
    ending: tuple[int, ...] = ()
    anchors: Anchors | None = None

    @property
    def is_plain(self) -> bool:
        """Whether prompts hold only documents and the question (K = 0 linking)."""
        return not (*self.cached_tokens, *self.computed_tokens)

    @property
    def most_documents(self) -> int | None:
        """For how many documents link tokens were trained; None: any number."""
        return len(self.links) or None

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """Tokens that the layout puts inside caches."""
        return (*self.before, *self.after, *(self.anchors.tokens if self.anchors else ()))

    @property
    def computed_tokens(self) -> tuple[int, ...]:
        """Tokens that the layout computes in each prompt."""
        links = (token for each in self.links for token in each)
        return (*self.opening, *links, *self.closing, *self.ending)

    @property
    def soft_tokens(self) -> int:
        """How many soft tokens it uses; 0 for none."""
        return max(0, -min((*self.cached_tokens, *self.computed_tokens), default=0))

    def cache_length(self, tokens: int) -> int:
        """Length of the cache of a document.

        Args:
            tokens: Number of its own tokens.

        Returns:
            These plus the tokens of the layout.
        """
        own = self.anchors.length(tokens) if self.anchors else tokens
        return len(self.before) + own + len(self.after)

    def own_length(self, length: int) -> int:
        """Number of own tokens of a document from its cache's length.

        Raises:
            ArgumentError: No document has a cache of that length in this layout.
        """
        own = length - len(self.before) - len(self.after)
        if self.anchors:
            count = len(self.anchors.tokens)
            chunks, rest = divmod(own, self.anchors.chunk + count)
            own = chunks * self.anchors.chunk + max(0, rest - count)
        if own < 1 or self.cache_length(own) != length:
            msg = f"the layout {self.name} has no caches of {length} tokens; encode the document with that layout"
            raise ArgumentError(msg)
        return own

    def cache_tokens(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens that a document's cache is computed from.

        Args:
            token_ids: The document's own.

        Returns:
            These with the layout's tokens around and between them.
        """
        own = self.anchors.insert(token_ids) if self.anchors else token_ids
        return (*self.before, *own, *self.after)

    def cache_visible(self, length: int) -> Tensor | None:
        """Attention mask within a document's cache.

        Args:
            length: Of the cache before pruning.

        Returns:
            Bool ``[length, length]``; None: causal.
        """
        if self.anchors is None:
            return None
        start, stop = len(self.before), length - len(self.after)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        visible[start:stop, start:stop] = self.anchors.visible(stop - start)
        visible[stop:, start:stop] = self.anchors.is_anchor(stop - start)
        return visible

    def cache_stored(self, length: int) -> Tensor | None:
        """Which tokens of a document's cache are stored.

        Args:
            length: Of the cache before pruning.

        Returns:
            Bool ``[length]``; None: all.
        """
        if self.anchors is None:
            return None
        start, stop = len(self.before), length - len(self.after)
        stored = torch.ones(length, dtype=torch.bool)
        stored[start:stop] = self.anchors.is_anchor(stop - start)
        return stored

    def lay_out(
        self, documents: Sequence[Sequence[int] | int], question: Sequence[int] = (), system: Sequence[int] = (),
        answer: Sequence[int] = (),
    ) -> PromptLayout:  # fmt: skip
        """Lay out a prompt.

        Args:
            documents: Own tokens of each, or their number, in prompt order.
            question: Token ids.
            system: Token ids of the system text.
            answer: Token ids of the answer, known in training.

        Returns:
            The prompt's layout.

        Raises:
            ArgumentError: There is no document, one is empty, or link tokens were trained for fewer documents.
        """
        count, most = len(documents), self.most_documents
        if most is not None and count > most:
            msg = f"the layout {self.name} has link tokens for {most} documents, the prompt has {count}; name fewer"
            raise ArgumentError(msg)
        segments: list[Segment] = []
        at = 0
        for kind, document, tokens in self._parts(documents, question, system, answer):
            ids = None if isinstance(tokens, int) else tuple(tokens)
            length = tokens if isinstance(tokens, int) else len(tokens)
            if length:
                segments.append(Segment(kind, at, length, ids, document))
            at += length
        return PromptLayout(self, tuple(segments))

    def _parts(
        self, documents: Sequence[Sequence[int] | int], question: Sequence[int], system: Sequence[int],
        answer: Sequence[int],
    ) -> Iterator[tuple[SegmentKind, int | None, Sequence[int] | int]]:  # fmt: skip
        """Kinds, documents and tokens of a prompt's segments, empty ones included."""
        lengths = [each if isinstance(each, int) else len(each) for each in documents]
        if not lengths or min(lengths) < 1:
            raise ArgumentError("a linked prompt needs documents of at least one token each")
        yield "system", None, system
        yield "opening", None, self.opening
        for index, own in enumerate(documents):
            yield "document", index, self.cache_length(own) if isinstance(own, int) else self.cache_tokens(own)
            yield "links", index, self.links[index] if self.links else ()
        yield "closing", None, self.closing
        yield "question", None, question
        yield "ending", None, self.ending
        yield "answer", None, answer


@dataclass(frozen=True)
class PromptLayout:
    """The segments of one prompt, at positions from 0 without gaps.

    Attributes:
        layout: The method's.
        segments: In prompt order, without empty ones.
    """

    layout: LinkLayout
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.segments[-1].stop

    @property
    def documents(self) -> tuple[Segment, ...]:
        """The documents' caches."""
        return tuple(each for each in self.segments if each.is_cached)

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each document's cache."""
        return tuple(each.start for each in self.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each document's cache."""
        return tuple(each.tokens for each in self.documents)

    @property
    def question_start(self) -> int:
        """Position of the question's first token."""
        return max(each.stop for each in self.segments if each.kind not in {"question", "ending", "answer"})

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the prompt.

        Raises:
            ArgumentError: It was laid out from lengths only.
        """
        if any(each.token_ids is None for each in self.segments):
            raise ArgumentError("the tokens of a document are not known; lay the prompt out with them")
        return tuple(token for each in self.segments for token in each.token_ids or ())

    def positions(self, *kinds: SegmentKind) -> Tensor:
        """Positions of the tokens of some kinds.

        Args:
            kinds: Of the segments; none: all computed ones.

        Returns:
            int64, ascending.
        """
        chosen = [each for each in self.segments if (each.kind in kinds if kinds else not each.is_cached)]
        return torch.cat([torch.arange(each.start, each.stop) for each in chosen] or [torch.arange(0)])

    def front_rows(self) -> tuple[Tensor, tuple[int, ...]]:
        """Rows computed before the question: system text, markers and link tokens.

        Returns:
            Positions, int64 in ascending order, and their tokens.
        """
        before = [each for each in self.segments if not each.is_cached and each.start < self.question_start]
        places = [torch.arange(each.start, each.stop) for each in before]
        return torch.cat(places or [torch.arange(0)]), tuple(id_ for each in before for id_ in each.token_ids or ())

    def visible(self, kept: Sequence[Tensor | None] | None = None) -> Tensor:
        """Attention mask of the prompt, in training or for one pass.

        Args:
            kept: For each document's cache, bool ``[tokens]``: tokens still there after pruning; None: those that the
                layout stores.

        Returns:
            Bool ``[tokens, tokens]``: row r sees column c.
        """
        total = self.tokens
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        visible = torch.zeros(total, total, dtype=torch.bool)
        visible[self.positions()] = causal[self.positions()] & self._stored(kept)
        for each in self.documents:
            part, inside = slice(each.start, each.stop), self.layout.cache_visible(each.tokens)
            visible[part, part] = causal[part, part] if inside is None else inside
        return visible

    def _stored(self, kept: Sequence[Tensor | None] | None) -> Tensor:
        """Which tokens computed rows can attend to, bool ``[tokens]``."""
        stored = torch.ones(self.tokens, dtype=torch.bool)
        for index, each in enumerate(self.documents):
            mask = self.layout.cache_stored(each.tokens) if kept is None else kept[index]
            if mask is not None:
                stored[each.start : each.stop] = mask
        return stored
