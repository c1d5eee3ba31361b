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
        text: What was said.
    """

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True)
class Chat:
    """What a model's chat template is to put around documents; they and the question are the user's last turn.

    Attributes:
        system: The system turn; None: the template's own, if it has one.
        turns: Earlier turns, the first one first; the user's and the assistant's by turns.
        before: The user's words before the documents.
        after: The user's words after the question.
    """

    system: str | None = None
    turns: tuple[Turn, ...] = ()
    before: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        """Refuse turns that are none."""
        object.__setattr__(self, "turns", tuple(self.turns))
        roles = [turn.role for turn in self.turns]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            msg = (
                f"earlier turns are the user's and the assistant's by turns, and end with the assistant's; got {roles}"
            )
            raise ArgumentError(msg)


@dataclass(frozen=True)
class RenderedChat:
    """A chat in a model's tokens.

    Attributes:
        head: Token ids before the documents, from the opening tokens (BOS) on.
        tail: Token ids behind the documents, up to where the assistant begins.
        stop: Token ids that end the assistant's turn.
    """

    head: tuple[int, ...]
    tail: tuple[int, ...]
    stop: frozenset[int] = frozenset()
