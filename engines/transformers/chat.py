"""Chat templates rendered around documents whose tokens are already cached."""

from __future__ import annotations

import re
import secrets
import sys
import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.types import Chat, RenderedChat, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from transformers import PreTrainedTokenizerBase

    from kvwire.engines.texts import Place
    from kvwire.engines.transformers.tokenizing import PieceTokenizer


_SAID = "a"
"""Placeholder for a turn's text."""
_TEMPLATE_S = 5.0
"""Longest run of a template; those of models take milliseconds."""


@dataclass(frozen=True)
class Script:
    """A prompt with a place for documents, or for an answer.

    Attributes:
        said: Its texts; control tokens spelled in them count as text.
        write: Renders the prompt from replacements of these texts, and a mark in place of the documents.
        trouble: Error message if the mark does not occur exactly once; its placeholder is the count.
    """

    said: tuple[str, ...]
    write: Callable[[Sequence[str], str], str]
    trouble: str

    def around(self, said: Sequence[str], mark: str) -> tuple[str, str]:
        """The rendered text before and after the documents."""
        head, *rest = self.write(said, mark).split(mark)
        if len(rest) != 1:
            raise ArgumentError(self.trouble.format(len(rest)))
        return head, rest[0]


def render(pieces: PieceTokenizer, chat: Chat, question: str, *, further: bool = False) -> RenderedChat:
    """Render a chat's template around documents or, with ``further``, the turn after an answer."""
    script = _answer_script(pieces, chat, question) if further else _chat_script(pieces, chat, question)
    return RenderedChat(*read_around(pieces, script), _stop(pieces, chat, _Marks(script.said).documents))


def read_around(pieces: PieceTokenizer, script: Script) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids before and after a script's documents."""
    marks = _Marks(script.said)
    head, tail = script.around(script.said, marks.documents)
    front, rest = pieces(head, "first", "frame"), pieces(tail, "last", "frame")
    quiet = script.around([_SAID if text else "" for text in script.said], marks.documents)
    if _control(pieces, front, rest) != _control(
        pieces, pieces(quiet[0], "first", "frame"), pieces(quiet[1], "last", "frame")
    ):
        head, tail = script.around(marks.shown, marks.documents)  # a text contains control tokens: only the
        front, rest = marks.read(pieces, head, "first"), marks.read(pieces, tail, "last")  # template's own count
    if tuple(front[: len(pieces.opening)]) != pieces.opening:  # documents were computed after it
        front = [*pieces.opening, *front]
    return tuple(front), tuple(rest)


class _Marks:
    """Random words that stand for texts while a template is rendered: alphanumeric, so templates keep them."""

    def __init__(self, said: Sequence[str]) -> None:
        """Draw words that occur in none of the texts."""
        word = f"Xx{secrets.token_hex(12)}"
        while any(word in text for text in said):
            word = f"Xx{secrets.token_hex(12)}"
        self._word, self._said = word, said
        self.documents = f"{word}d"
        self.shown = [f"{word}t{number}e" if text else "" for number, text in enumerate(said)]

    def read(self, pieces: PieceTokenizer, text: str, place: Place) -> list[int]:
        """Tokenise the rendered template: its own words as frame, marks as the texts they stand for."""
        parts = re.split(rf"{self._word}t(\d+)e", text)
        ids: list[int] = []
        for number, part in enumerate(parts):
            at: Place = place if number == (0 if place == "first" else len(parts) - 1) else "middle"
            if number % 2:
                ids += pieces(self._said[int(part)], at, "document")
            elif part:
                ids += pieces(part, at, "frame")
        return ids


def _control(pieces: PieceTokenizer, *texts: Sequence[int]) -> list[list[int]]:
    return [[token for token in ids if token in pieces.control] for ids in texts]


def _said_in(chat: Chat, question: str) -> tuple[str, ...]:
    return (chat.system or "", chat.before, chat.after, question, *(turn.text for turn in chat.turns))


def _saying(chat: Chat, said: Sequence[str]) -> tuple[Chat, str]:
    """The chat with its texts replaced, and the question."""
    system, before, after, question, *others = said
    turns = tuple(replace(turn, text=text) for turn, text in zip(chat.turns, others, strict=True))
    return Chat(None if chat.system is None else system, turns, before, after), question


def _chat_script(pieces: PieceTokenizer, chat: Chat, question: str) -> Script:
    """Documents in the user's last turn, before the question."""

    def write(said: Sequence[str], mark: str) -> str:
        other, asked = _saying(chat, said)
        return _rendered(pieces.tokenizer, other, f"{other.before}{mark}{asked}{other.after}")

    trouble = (
        "the model's chat template has the user's text {} times, and documents are linked once; ask without a chat, or "
        "with a template of its own for documents"
    )
    return Script(_said_in(chat, question), write, trouble)


def _answer_script(pieces: PieceTokenizer, chat: Chat, question: str) -> Script:
    """An answer in place of documents, followed by the user's next turn."""

    def write(said: Sequence[str], mark: str) -> str:
        other, asked = _saying(chat, said)
        answered = replace(other, turns=(*other.turns, Turn("user", _SAID), Turn("assistant", mark)))
        return _rendered(pieces.tokenizer, answered, f"{other.before}{asked}{other.after}")

    trouble = "the model's chat template has an earlier answer {} times: such a chat cannot be continued"
    return Script(_said_in(chat, question), write, trouble)


def turns_apart(pieces: PieceTokenizer, chat: Chat, token_ids: Sequence[int]) -> str:
    """First difference between a conversation's tokens and its template rendered over all turns, in words."""
    script = _answer_script(pieces, replace(chat, before="", after=""), _SAID)
    before, _ = script.around(script.said, _Marks(script.said).documents)
    if _rendered(pieces.tokenizer, chat, _SAID) != before:
        return "the chat template renders a turn differently once more follow: earlier turns stay as they were run"
    text = str(pieces.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))
    wanted = pieces(text, "first", "frame")
    if list(token_ids) == wanted or _control(pieces, wanted) != _control(pieces, token_ids):
        return ""
    at = next((n for n, pair in enumerate(zip(token_ids, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
    return f"the session's tokens differ from those of its text at token {at}: turns keep the tokens they were run with"


def apart(
    pieces: PieceTokenizer, chat: Chat, question: str, documents: Sequence[Sequence[int]], rendered: RenderedChat
) -> str:
    """First difference between a chat's tokens around documents and its template rendered at once, in words."""
    texts = [str(pieces.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)) for ids in documents]
    script = _chat_script(pieces, chat, question)
    whole = script.write(script.said, "".join(texts))
    wanted = pieces(whole, "first", "frame")
    if tuple(wanted[: len(pieces.opening)]) != pieces.opening:
        wanted = [*pieces.opening, *wanted]
    parts = [rendered.head, *map(tuple, documents), rendered.tail]
    ours = [token for part in parts for token in part]
    if ours == wanted or _control(pieces, wanted) != _control(pieces, ours):
        return ""
    at = next((n for n, pair in enumerate(zip(ours, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
    names = ["the text before the documents", *(f"document {n + 1}" for n in range(len(documents))), "the question"]
    starts = list(accumulate((len(part) for part in parts[:-1]), initial=0))
    part = bisect_right(starts, at) - 1
    return (
        f"the tokens differ from the chat template's at token {at - starts[part]} of {names[part]}: documents keep "
        "their own tokens where they meet other text; end them with one line break"
    )


def render_template(tokenizer: PreTrainedTokenizerBase, messages: list[Any], **options: Any) -> str:  # noqa: ANN401
    """Run a model's chat template, which is a program that somebody else wrote: one that takes too long is stopped."""
    until, before = time.monotonic() + _TEMPLATE_S, sys.gettrace()

    def watched(_frame: FrameType, _event: str, _value: object) -> Any:  # noqa: ANN401 - itself
        if time.monotonic() > until:
            raise TimeoutError(f"it ran for {_TEMPLATE_S:g} s; look for a loop in it (chat_template.jinja)")
        return watched

    sys.settrace(watched)  # of this thread alone: called at every line of what the template was compiled to
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    finally:
        sys.settrace(before)


def _stop(pieces: PieceTokenizer, chat: Chat, mark: str) -> frozenset[int]:
    """The control token after the assistant's text in the template; empty without one."""
    messages = [*_messages(replace(chat, turns=()), "a"), {"role": "assistant", "content": mark}]
    try:
        text = render_template(pieces.tokenizer, messages)
    except Exception:  # noqa: BLE001 - whatever a template raises: the model's own end tokens serve
        return frozenset()
    ids = pieces(text.rpartition(mark)[2], "middle", "frame")
    return frozenset(ids[:1]) & pieces.control


def _messages(chat: Chat, content: str) -> list[dict[str, str]]:
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    turns = [{"role": turn.role, "content": turn.text} for turn in chat.turns]
    return [*system, *turns, {"role": "user", "content": content}]


def _rendered(tokenizer: PreTrainedTokenizerBase, chat: Chat, content: str) -> str:
    if not tokenizer.chat_template:
        raise NotFoundError(
            "the model's tokenizer has no chat template; ask without a chat, or put the template of a model that was "
            "trained for chats beside the weights (chat_template.jinja)"
        )
    try:
        return render_template(tokenizer, _messages(chat, content), add_generation_prompt=True)
    except Exception as error:  # templates raise anything
        raise ArgumentError(f"the model's chat template refuses this chat: {error}") from error
