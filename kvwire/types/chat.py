"""A chat around linked documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvwire.errors import ArgumentError


@dataclass(frozen=True)
class Turn:
    """An earlier turn of a chat.

    Attributes:
        role: Who spoke: ``user`` or ``assistant``.
        text: The turn's text.
    """

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True)
class Chat:
    """Turns for a model's chat template; documents and question are the user's last turn.

    Attributes:
        system: The system turn; None: the template's default, if any.
        turns: Earlier turns, oldest first, alternating between user and assistant.
        before: The user's text before the documents.
        after: The user's text after the question.
    """

    system: str | None = None
    turns: tuple[Turn, ...] = ()
    before: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        """Refuse turns that do not alternate."""
        object.__setattr__(self, "turns", tuple(self.turns))
        roles = [turn.role for turn in self.turns]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            msg = f"earlier turns must alternate between user and assistant, and end with the assistant's; got {roles}"
            raise ArgumentError(msg)


@dataclass(frozen=True)
class RenderedChat:
    """A chat in a model's tokens.

    Attributes:
        head: Token ids before the documents, from the opening tokens (BOS) on.
        tail: Token ids after the documents, up to where the assistant begins.
        stop: Token ids that end the assistant's turn.
    """

    head: tuple[int, ...]
    tail: tuple[int, ...]
    stop: frozenset[int] = frozenset()
