"""Input and output of a load: the first token, how it came about, and where the time went."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvwire.controller import fetched_levels, kl_floor
from kvwire.errors import ArgumentError, KvwireError
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkedPrompt, Repaired
    from kvwire.runtime.document import OpenDocument
    from kvwire.runtime.settings import LoadSettings
    from kvwire.types import BlobInfo, Chat, Decision, RenderedChat


@dataclass(frozen=True)
class Timing:
    """Where the time to the first token went, in seconds.

    The parts overlap, so they add up to more than ``ttft_s``.

    Attributes:
        ttft_s: From the call to the first token, catalog lookups included.
        fetch_s: Until the last used byte arrived.
        decode_s: Compute time of decoding chunks, partly during fetches.
        recompute_s: Compute time of recomputing chunks, partly during fetches.
        link_s: Building the engine's cache, and adding the mean shift of links.
        query_s: The question's forward pass.
        repair_s: Choosing and recomputing rows of the prompt, partly during fetches.
        look_s: Running the question on coarse levels during fetches of finer ones, to rank these.
        front_s: Computing the tokens before the question: system text, a chat's head, markers and link tokens.
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
        document: The stored document that the prompt begins with; empty without one.
        loaded: Number of the prompt's tokens loaded from the store.
        computed: Number of computed tokens.
        saved: The document in which prompt and answer were saved, or, if made from donors, are being saved; empty if
            they were not.
        donors: Names of the similar documents whose rows were moved into the prompt, with the number of tokens of each.
        holes: Number of tokens computed between these.
        repaired: Number of moved rows that were recomputed.
        error: KL divergence of such edits when the model was checked; None if it was not.
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
        prompt: The linked cache of all documents. Its tensors are views of memory that also holds question and answer;
            clone them before storing them.
        decisions: The controller's decisions for the chunks.
        reason: The reason for them, in words.
        timing: Where the time went.
        bytes: Bytes fetched, headers included.
        misses: In words: faults healed by recomputing or a lower level, and a question that begins with a BOS.
        predicted_s: Time to first token from the first complete plan; None without one.
        error: Mean over the documents' tokens of the measured errors of their levels; recomputed chunks count with
            their blob's finest.
        repair: The recomputed rows of the prompt, and their cost; None without any.
        front: Tokens from the prompt's beginning on that saw all tokens before them even without repair: the first
            document, or after a system text its recomputed beginning, with what was recomputed after it if links are
            repaired; 0 if a layout computes tokens before the question.
        link_warning: Why linking makes this answer doubtful, as measured by ``kvwire check-model``; empty without a
            reason.
        computed: Number of tokens computed before the question: system text, a chat's head, a layout's markers and link
            tokens.
        shifted: Number of the prompt's tokens to which the mean shift was added, before any repair.
        document_kl: For each document, the expected KL divergence of its levels from exact caches, in nats, mean over
            its tokens: recomputed chunks have 0. None if its blob has no prediction.
        expected_kl: The same for the whole prompt, mean over the documents' tokens; None if one is not known.
        reused: For a prompt or a session's turn, where its tokens came from; else None.
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
    """A chat as requested and as rendered."""

    chat: Chat
    question: str
    rendered: RenderedChat

    def apart(self, engine: Engine, documents: Sequence[Sequence[int] | None]) -> str:
        """First difference from the template's tokens, in words; empty if there is none, or it cannot be known."""
        known = [ids for ids in documents if ids and min(ids) >= 0 and max(ids) < engine.vocabulary_size]
        if len(known) < len(documents):
            return ""
        try:
            return engine.check_chat(self.chat, self.question, known, self.rendered)
        except KvwireError as error:
            return f"the chat's tokens were not compared with the template's: {error}"


@dataclass(frozen=True)
class Asked:
    """Tokens around documents.

    Attributes:
        question: Token ids after them.
        system: Token ids before them.
        stop: Further token ids that end the answer.
        chat: The chat, if there is one.
    """

    question: Sequence[int]
    system: tuple[int, ...]
    stop: frozenset[int] = frozenset()
    chat: ChatAsked | None = None


def asked_of(engine: Engine, settings: LoadSettings, question: Sequence[int] | str, chat: Chat | None) -> Asked:
    """Tokens around the documents."""
    if isinstance(question, str):
        if chat is None:
            return Asked(engine.tokenize(question, place="last", trust="frame"), settings.system)
    elif chat is not None:
        raise ArgumentError("in a chat the question is a text: the template is read together with it")
    else:
        return Asked(plain_token_ids(question), settings.system)
    if settings.system or settings.layout:
        raise ArgumentError("a chat's system text is Chat(system=...): leave out the settings' system and layout")
    rendered = engine.render_chat(chat, question)
    return Asked(rendered.tail, rendered.head, rendered.stop, ChatAsked(chat, question, rendered))


def check_length(tokens: int) -> None:
    """Refuse a length of an answer that is none."""
    try:
        is_length = operator.index(tokens) >= 1
    except TypeError:
        is_length = False
    if not is_length:
        raise ArgumentError(f"an answer has one token at least: tokens is a whole number from 1 on, got {tokens!r}")


def level_kl(info: BlobInfo, level: int | None) -> float | None:
    """Expected KL divergence of a blob's level; None if not known."""
    if level is None:
        return 0.0
    if info.levels[level].lossless and info.context_level is None:
        return 0.0
    return info.levels[level].predicted_kl


def unreached_floor(info: BlobInfo, floor: int, ceiling: int | None = None) -> str:
    """Describe that no level which loads choose from is as fine as a floor; empty where one is."""
    finest = len(fetched_levels(info)) - 1
    if floor <= finest or info.levels[finest].lossless:
        return ""
    if floor == ceiling and floor < len(info.levels):  # its lossless level alone is asked for
        return ""
    more = "; --exact takes the lossless one" if len(info.levels) > finest + 1 else ""
    return f"no level is as fine as {floor}, the floor that was asked for: {finest} is its finest{more}"


def floor_trouble(info: BlobInfo, max_kl: float, floor: int | None = None, ceiling: int | None = None) -> str:
    """Describe a fetchable level with a greater expected KL divergence than allowed; empty without one."""
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


def with_expected_kl(answer: Answer, documents: Sequence[OpenDocument]) -> Answer:
    """Add the expected KL divergence of the documents' levels to an answer: of the tokens that the prompt has."""
    tokens, sums = [0] * len(documents), [0.0] * len(documents)
    unknown: set[int] = set()
    for decision in answer.decisions:
        at, document = decision.chunk.document, documents[decision.chunk.document]
        if document.info is None:
            continue
        start, stop = document.span(decision.chunk.chunk)
        used = min(stop, document.wanted_tokens or stop) - start
        kl = level_kl(document.info, decision.level)
        tokens[at] += used
        if kl is None:
            unknown.add(at)
        else:
            sums[at] += used * kl
    each = tuple(
        None if at in unknown else total / max(1, count)
        for at, (total, count) in enumerate(zip(sums, tokens, strict=True))
    )
    lengths = answer.prompt.tokens
    weighed = [kl * length for kl, length in zip(each, lengths, strict=True) if kl is not None]
    whole = None if unknown else sum(weighed) / max(1, sum(lengths))
    return replace(answer, document_kl=each, expected_kl=whole)
