"""What a load is asked, and what it gives: the first token, how it came about, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvwire.controller import fetched_levels, kl_floor
from kvwire.errors import KvwireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkedPrompt, Repaired
    from kvwire.types import BlobInfo, Chat, Decision, RenderedChat


@dataclass(frozen=True)
class Timing:
    """Where the time to the first token went, in seconds.

    The parts overlap, so they add up to more than ``ttft_s``.

    Attributes:
        ttft_s: From the call to the first token, catalog lookups included.
        fetch_s: Until the last byte that was used arrived.
        decode_s: Compute spent on decoding chunks, in part while fetching.
        recompute_s: Compute spent on recomputing chunks, in part while fetching.
        link_s: Making the engine's cache, and adding the mean shift of links.
        query_s: The question's forward pass.
        repair_s: Choosing rows of the prompt and computing them anew, in part while fetching.
        look_s: Running the question on coarse levels while finer ones were fetched, to see which of these matter.
        front_s: Computing what stands before the question: system text, a chat's head, markers and link tokens.
    """

    ttft_s: float
    fetch_s: float
    decode_s: float
    recompute_s: float
    link_s: float
    query_s: float
    repair_s: float = 0.0
    look_s: float = 0.0
    front_s: float = 0.0


@dataclass(frozen=True)
class Reuse:
    """Where the tokens of a prompt came from.

    Attributes:
        document: The stored document that the prompt begins with; empty: none does.
        loaded: How many of the prompt's tokens came from the store.
        computed: How many were computed.
        saved: The document that prompt and answer are kept as; empty where they are not.
        donors: Names of the similar documents whose rows were moved into the prompt, and how many tokens of each.
        holes: How many tokens between these were computed.
        repaired: How many moved rows were computed anew.
        error: KL divergence that such edits had when the model was checked; None where it was not.
    """

    document: str
    loaded: int
    computed: int
    saved: str = ""
    donors: tuple[tuple[str, int], ...] = ()
    holes: int = 0
    repaired: int = 0
    error: float | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """The first token and how it came about.

    Attributes:
        first_token: Its id.
        logits: Of the question's last token, float32 ``[vocabulary]``.
        tokens: Token ids of the answer.
        text: The answer in words.
        prompt: The linked cache of all documents. Its tensors are views of memory that also holds what was computed
            behind it, of question and answer; clone them before they are saved or kept.
        decisions: What the controller decided for the chunks.
        reason: Why it decided so, in words.
        timing: Where the time went.
        bytes: Fetched, headers included.
        misses: What went wrong on the way and was healed by recomputing, or with a lower level, in words; and a
            question that begins with a BOS.
        predicted_s: The time to first token that the first complete plan expected, counted from the asking; None where
            there was none.
        error: Mean over the documents' tokens of the measured errors of the levels in use; a recomputed chunk counts
            with its blob's finest.
        repair: Which rows of the prompt were computed anew, and what that took; None where none were.
        front: Tokens from the prompt's beginning on that saw all that stands before them before anything was repaired:
            the first document, or behind a system text what of it was recomputed, and what was recomputed behind it
            where links are repaired; 0 where a layout computes tokens before the question.
        link_warning: Why documents that do not see each other make this answer doubtful, as far as the model was
            measured (``kvwire check-model``); empty where nothing says so.
        computed: How many tokens were computed before the question: system text, a chat's head, a layout's markers
            and link tokens.
        shifted: To how many tokens of the prompt the learnt mean shift of linked documents was added, before any row
            was computed anew.
        document_kl: Of each document, the KL divergence from exact caches to expect of the levels that it came at, in
            nats, the mean over its tokens: chunks that were recomputed have 0. None where its blob has no prediction.
        expected_kl: The same of the whole prompt, the mean over the documents' tokens; None where one is not known.
        reused: Of a prompt or a turn of a session, where its tokens came from; None of documents that were named.
    """

    first_token: int
    logits: Tensor = field(repr=False)
    tokens: tuple[int, ...]
    text: str
    prompt: LinkedPrompt
    decisions: tuple[Decision, ...]
    reason: str
    timing: Timing
    bytes: int
    misses: tuple[str, ...]
    predicted_s: float | None = None
    error: float = 0.0
    repair: Repaired | None = None
    link_warning: str = ""
    front: int = 0
    computed: int = 0
    shifted: int = 0
    document_kl: tuple[float | None, ...] = ()
    expected_kl: float | None = None
    reused: Reuse | None = None


@dataclass(frozen=True)
class ChatAsked:
    """A chat as it was asked for, and as it was rendered."""

    chat: Chat
    question: str
    rendered: RenderedChat

    def apart(self, engine: Engine, documents: Sequence[Sequence[int] | None]) -> str:
        """Where the prompt's tokens are not the template's, in words; empty where they are, or nobody knows."""
        known = [ids for ids in documents if ids and min(ids) >= 0 and max(ids) < engine.vocabulary_size]
        if len(known) < len(documents):
            return ""
        try:
            return engine.check_chat(self.chat, self.question, known, self.rendered)
        except KvwireError as error:
            return f"the chat's tokens were not compared with the template's: {error}"


@dataclass(frozen=True)
class Asked:
    """Token ids around documents.

    Attributes:
        question: Behind them.
        system: Before them.
        stop: Token ids that end the answer, besides the model's own.
        chat: Where a chat was asked for.
    """

    question: Sequence[int]
    system: tuple[int, ...]
    stop: frozenset[int] = frozenset()
    chat: ChatAsked | None = None


def level_kl(info: BlobInfo, level: int | None) -> float | None:
    """Look up what a blob expects of a level."""
    if level is None:
        return 0.0
    if info.levels[level].lossless:
        return 0.0 if info.context_level is None else info.levels[info.context_level].predicted_kl
    return info.levels[level].predicted_kl


def floor_trouble(info: BlobInfo, max_kl: float, floor: int | None = None, ceiling: int | None = None) -> str:
    """Say in words where levels may be fetched of which a greater KL divergence is expected than is wanted."""
    lossy = len(fetched_levels(info))
    own = kl_floor(info, max_kl)
    if floor is not None:
        level, what = min(floor, lossy - 1), "the floor that was asked for"
    elif ceiling is not None and ceiling < own:
        level, what = ceiling, "the ceiling that was asked for"
    else:
        level, what = own, ""
    kl = level_kl(info, level)
    if kl is None or kl <= max_kl:
        return ""
    if what:
        return f"level {level}, {what}, has an expected KL of {kl:.2g}, above {max_kl:g}"
    return (
        f"no level is predicted within KL {max_kl:g}, the finest, {level}, has {kl:.2g}; encode with finer levels or "
        "raise max_kl"
    )


def with_expected_kl(answer: Answer, infos: Sequence[BlobInfo | None]) -> Answer:
    """Add to an answer which KL divergence is expected of the levels that its documents came at."""
    tokens, sums = [0] * len(infos), [0.0] * len(infos)
    unknown: set[int] = set()
    for decision in answer.decisions:
        at, info = decision.chunk.document, infos[decision.chunk.document]
        if info is None:
            continue
        start, stop = info.chunk_span(decision.chunk.chunk)
        kl = level_kl(info, decision.level)
        tokens[at] += stop - start
        if kl is None:
            unknown.add(at)
        else:
            sums[at] += (stop - start) * kl
    each = tuple(
        None if at in unknown else total / max(1, count)
        for at, (total, count) in enumerate(zip(sums, tokens, strict=True))
    )
    lengths = answer.prompt.tokens
    weighed = [kl * length for kl, length in zip(each, lengths, strict=True) if kl is not None]
    whole = None if unknown else sum(weighed) / max(1, sum(lengths))
    return replace(answer, document_kl=each, expected_kl=whole)
