"""A prompt that is asked for, and what was found of it in the store."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from kvwire.controller import Goal
    from kvwire.runtime.document import FoundDocument, Timeouts
    from kvwire.runtime.similar import Search
    from kvwire.types import Chat

SESSIONS = "sessions/"
"""What names of sessions begin with in the store."""
LAST_TOKENS = 32
"""Of a prompt that is made of similar ones, computed in any case: they see it whole, and choose what is repaired."""
ReuseMode = Literal["auto", "exact", "donors", "none"]


class Reusing(NamedTuple):
    """What of the store a prompt may be made of.

    Attributes:
        mode: As ``Loader.ask_prompt`` takes it; empty: as it does where nothing is said.
        donors: Names of the donors; empty: they are searched.
        last: How many of the prompt's last tokens are computed in any case.
    """

    mode: ReuseMode | Literal[""] = ""
    donors: tuple[str, ...] = ()
    last: int = LAST_TOKENS


@dataclass(frozen=True, eq=False)
class PromptRequest:
    """How a prompt is asked for.

    Attributes:
        goal: The controller's; its deadline counts from ``started``.
        timeouts: Longest waits, from ``started``.
        reusing: What of the store it may be made of.
        whole: Its token ids, opening tokens included; empty: not known yet.
        started: When it was asked for, on ``time.monotonic``.
        misses: What went wrong while it was looked for: added to as it goes.
    """

    goal: Goal
    timeouts: Timeouts
    reusing: Reusing = field(default_factory=Reusing)
    whole: tuple[int, ...] = ()
    started: float = field(default_factory=time.monotonic)
    misses: list[str] = field(default_factory=list)


class Keep(NamedTuple):
    """How a prompt is kept: under which name, in place of which version, and how long its head is, BOS included."""

    name: str = ""
    etag: str | None = None
    head: int = 0


@dataclass(frozen=True, eq=False)
class Begun:
    """A prompt whose beginning was found: what is loaded, what is asked, and what is done with the answer.

    Attributes:
        request: How it was asked for.
        found: The document that it begins with.
        wanted: How many of the document's first tokens it has.
        rest: Token ids behind these.
        keep: How it is kept; None: it is not.
        chat: Of a session that is one.
        stop: Token ids that end an answer, and are no part of what is kept.
        head: What the session should have begun with; empty: anything.
        search: What was found that is like it; None: nothing was looked for.
        keeps_donors: What is kept of it may serve prompts like it.
        document: Name of the stored document that it begins with, whether that is loaded or computed.
    """

    request: PromptRequest
    found: FoundDocument
    wanted: int
    rest: tuple[int, ...]
    keep: Keep | None
    chat: Chat | None = None
    stop: frozenset[int] = frozenset()
    head: tuple[int, ...] = ()
    search: Search | None = None
    keeps_donors: bool = False
    document: str = ""

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt's token ids without its opening, where the found document's are known."""
        return (*(self.found.text or ())[: self.wanted], *self.rest)

    @property
    def is_whole(self) -> bool:
        """Whether the prompt has all of the document."""
        return self.wanted >= self.found.tokens
