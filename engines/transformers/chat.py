"""Chat templates rendered around documents whose tokens are already cached."""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.types import Chat, RenderedChat, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from kvwire.engines.base import Place
    from kvwire.engines.transformers.tokenizing import PieceTokenizer

    Around = Callable[[PieceTokenizer, Chat, str, str], tuple[str, str]]

_PLACEHOLDER = "a"
"""Placeholder for a turn's text."""


def render(pieces: PieceTokenizer, chat: Chat, question: str, *, further: bool = False) -> RenderedChat:
    """Render a chat's template around documents or, with ``further``, the turn after an answer."""
    marks = _Marks(chat, question)
    around = _behind_answer if further else _around
    head, tail = around(pieces, chat, question, marks.documents)
    front, rest = pieces(head, "first", "frame"), pieces(tail, "last", "frame")
    if _control(pieces, front, rest) != _control(pieces, *_harmless(pieces, chat, question, marks.documents, around)):
        shown = marks.shown(chat)  # a text contains control tokens: only the template's own count
        head, tail = around(pieces, *shown, marks.documents)
        front, rest = marks.read(pieces, head, "first"), marks.read(pieces, tail, "last")
    if tuple(front[: len(pieces.opening)]) != pieces.opening:  # documents were computed after it
        front = [*pieces.opening, *front]
    return RenderedChat(tuple(front), tuple(rest), _stop(pieces, chat, marks.documents))


class _Marks:
    """Random words that stand for texts while a template is rendered: alphanumeric, so templates keep them."""

    def __init__(self, chat: Chat, question: str) -> None:
        """Draw words that occur in none of the texts."""
        texts = [chat.system or "", chat.before, chat.after, question, *(turn.text for turn in chat.turns)]
        while any((word := f"Xx{secrets.token_hex(12)}") in text for text in texts):
            pass
        self._word, self._texts = word, texts
        self.documents = f"{word}d"

    def shown(self, chat: Chat) -> tuple[Chat, str]:
        """The chat and question, with a mark in place of each text."""
        marked = [f"{self._word}t{number}e" if text else "" for number, text in enumerate(self._texts)]
        system, before, after, question, *others = marked
        turns = tuple(replace(turn, text=text) for turn, text in zip(chat.turns, others, strict=True))
        return Chat(None if chat.system is None else system, turns, before, after), question

    def read(self, pieces: PieceTokenizer, text: str, place: Place) -> list[int]:
        """Tokenise the rendered template: its own words as frame, marks as the texts they stand for."""
        parts = re.split(rf"{self._word}t(\d+)e", text)
        ids: list[int] = []
        for number, part in enumerate(parts):
            part_place: Place = place if number == (0 if place == "first" else len(parts) - 1) else "middle"
            if number % 2:
                ids += pieces(self._texts[int(part)], part_place, "document")
            elif part:
                ids += pieces(part, part_place, "frame")
        return ids


def _harmless(
    pieces: PieceTokenizer, chat: Chat, question: str, mark: str, around: Around
) -> tuple[list[int], list[int]]:
    """Render the same chat with short harmless texts."""

    def placeholder(text: str) -> str:
        return "a" if text else ""

    turns = tuple(replace(turn, text=placeholder(turn.text)) for turn in chat.turns)
    system = None if chat.system is None else placeholder(chat.system)
    quiet = Chat(system, turns, placeholder(chat.before), placeholder(chat.after))
    head, tail = around(pieces, quiet, placeholder(question), mark)
    return pieces(head, "first", "frame"), pieces(tail, "last", "frame")


def _control(pieces: PieceTokenizer, *texts: Sequence[int]) -> list[list[int]]:
    return [[token for token in ids if token in pieces.control] for ids in texts]


def _around(pieces: PieceTokenizer, chat: Chat, question: str, mark: str) -> tuple[str, str]:
    """The template's text before and after the documents."""
    head, *rest = _rendered(pieces.tokenizer, chat, f"{chat.before}{mark}{question}{chat.after}").split(mark)
    if len(rest) != 1:
        msg = (
            f"the model's chat template has the user's text {len(rest)} times, and documents are linked once; ask "
            "without a chat, or with a template of its own for documents"
        )
        raise ArgumentError(msg)
    return head, rest[0]


def _behind_answer(pieces: PieceTokenizer, chat: Chat, question: str, mark: str) -> tuple[str, str]:
    """The template's text before and after an answer, up to the next one."""
    answered = replace(chat, turns=(*chat.turns, Turn("user", _PLACEHOLDER), Turn("assistant", mark)))
    content = f"{chat.before}{question}{chat.after}"
    head, *rest = _rendered(pieces.tokenizer, answered, content).split(mark)
    if len(rest) != 1:
        msg = f"the model's chat template has an earlier answer {len(rest)} times: such a chat cannot be continued"
        raise ArgumentError(msg)
    return head, rest[0]


def turns_apart(pieces: PieceTokenizer, chat: Chat, token_ids: Sequence[int]) -> str:
    """First difference between a conversation's tokens and its template rendered over all turns, in words."""
    mark = _Marks(chat, "").documents
    before, _ = _behind_answer(pieces, replace(chat, before="", after=""), _PLACEHOLDER, mark)
    if _rendered(pieces.tokenizer, chat, _PLACEHOLDER) != before:
        return "the chat template renders a turn differently once more follow: earlier turns stay as they were run"
    text = str(pieces.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))
    expected = pieces(text, "first", "frame")
    if list(token_ids) == expected or _control(pieces, expected) != _control(pieces, token_ids):
        return ""
    index = next(
        (n for n, pair in enumerate(zip(token_ids, expected, strict=False)) if pair[0] != pair[1]), len(expected)
    )
    return (
        f"the session's tokens differ from those of its text at token {index}: turns keep the tokens they were run with"
    )


def apart(
    pieces: PieceTokenizer, chat: Chat, question: str, documents: Sequence[Sequence[int]], rendered: RenderedChat
) -> str:
    """First difference between a chat's tokens around documents and its template rendered at once, in words."""
    tokenizer = pieces.tokenizer
    texts = [str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)) for ids in documents]
    whole = _rendered(tokenizer, chat, f"{chat.before}{''.join(texts)}{question}{chat.after}")
    expected = pieces(whole, "first", "frame")
    if tuple(expected[: len(pieces.opening)]) != pieces.opening:
        expected = [*pieces.opening, *expected]
    parts = [rendered.head, *map(tuple, documents), rendered.tail]
    actual = [token for part in parts for token in part]
    if actual == expected or _control(pieces, expected) != _control(pieces, actual):
        return ""
    index = next((n for n, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), len(expected))
    names = ["the text before the documents", *(f"document {n + 1}" for n in range(len(documents))), "the question"]
    starts = list(accumulate((len(part) for part in parts[:-1]), initial=0))
    part = bisect_right(starts, index) - 1
    return (
        f"the tokens differ from the chat template's at token {index - starts[part]} of {names[part]}: documents keep "
        "their own tokens where they meet other text; end them with one line break"
    )


def _stop(pieces: PieceTokenizer, chat: Chat, mark: str) -> frozenset[int]:
    """The control token after the assistant's text in the template; empty without one."""
    messages = [*_messages(replace(chat, turns=()), "a"), {"role": "assistant", "content": mark}]
    try:
        text = str(pieces.tokenizer.apply_chat_template(messages, tokenize=False))
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
        msg = (
            "the model's tokenizer has no chat template; ask without a chat, or put the template of a model that was "
            "trained for chats beside the weights (chat_template.jinja)"
        )
        raise NotFoundError(msg)
    try:
        return str(tokenizer.apply_chat_template(_messages(chat, content), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise anything
        msg = f"the model's chat template refuses this chat: {error}"
        raise ArgumentError(msg) from error
