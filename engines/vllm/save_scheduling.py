"""Which requests are kept, decided in the scheduler's process; ``saving`` copies and stores their rows.

Rows that were loaded are not written again. Where a request asks for its prefix and to be saved, what is new becomes a
part behind what the store has, which says over which level it was computed; else only prompts all of whose rows vLLM
computed are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from .requests import SALTED, Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SaveMode: TypeAlias = Literal["off", "asked", "all", "named"]


@dataclass(frozen=True)
class PageSave:
    """What a worker is to keep."""

    request_id: str  # whose pages
    token_ids: tuple[int, ...]  # of the prompt, all of whose rows were computed
    blocks: tuple[int, ...]  # the request's, from its first token on; they are not given away before they were copied
    event: object = None  # what is told once the prompt is in the store; None: nothing
    document: str = ""  # the name that the request gave; empty: it is kept under one of its own
    trouble: str = ""  # why it is not kept after all, which who asked for a document of this name is told
    # ``whole``: as a document of its own; ``grown``: behind what the store has of it; ``exact``: without loss
    way: Literal["whole", "grown", "exact"] = "whole"
    # the coarsest that any of these rows is of, or was computed over; None: vLLM computed them all
    level: int | None = None
    head: int = 0  # how many first tokens are no part of the document of that name, but stood before it: BOS


@dataclass(eq=False)
class _Candidate:
    """One request. trouble: why it is not kept. grows: it may stand on loaded rows. had: vLLM had rows of it."""

    salt: str
    trouble: str
    document: str = ""
    grows: bool = False
    has_level: bool = True
    had: bool = False
    head: int = 0


class SaveScheduler:
    """The scheduler's half: which requests are kept. Called from one thread."""

    def __init__(self, mode: SaveMode, least_tokens: int, trouble: str = "") -> None:
        """Watch nothing yet."""
        self._mode, self._least, self._trouble = mode, least_tokens, trouble
        self._candidates: dict[str, _Candidate] = {}
        self._saves: list[PageSave] = []

    def begin(self, request_id: str, salt: str | None, choice: Choice | None, trouble: str = "") -> None:
        """Take in a request."""
        choice = choice or Choice()
        if choice.save or self._mode == "all":
            document = choice.save if isinstance(choice.save, str) else ""
            why = self._other_mode(document) or self._trouble or trouble
            grows = choice.prefix and choice.save is True
            head = choice.head if document else 0
            self._candidates[request_id] = _Candidate(
                salt or "", why, document, grows, choice.level is not None, head=head
            )

    def _other_mode(self, document: str) -> str:
        """Why no request like this one is kept: whoever may ask may not write over other documents, too."""
        if self._mode == "off":
            return 'this vLLM keeps nothing: start it with "save": "asked"'
        if document and self._mode != "named":
            return 'this vLLM keeps prompts under names of its own: start it with "save": "named"'
        if not document and self._mode == "named":
            return 'this vLLM keeps prompts under the names of documents: say "save": NAME'
        return ""

    def note_cached(self, request_id: str, tokens: int) -> None:
        """Note what vLLM has of a prompt before it computes: rows of other requests with the same salt."""
        candidate = self._candidates.get(request_id)
        if candidate and tokens and candidate.salt.startswith(SALTED):
            candidate.had = True
            if not (candidate.grows and candidate.has_level):
                more = ": ask for a level" if candidate.grows else ""
                candidate.trouble = candidate.trouble or f"vLLM had rows of it that may have been loaded{more}"

    def note_loaded(self, request_id: str) -> None:
        """Note that rows of a request are loaded."""
        if (candidate := self._candidates.get(request_id)) and not candidate.grows:
            candidate.trouble = candidate.trouble or "some of its rows were loaded"

    def end(
        self, request_id: str, prompt: Sequence[int], blocks: Sequence[int], *, is_computed: bool,
        event: Callable[[], object] | None = None, answer: Sequence[int] = (), head: int = 0,
        built_on: Callable[[bool], int | None] | None = None,
    ) -> str | int | None:  # fmt: skip
        """Decide about a request that ended; why it is not kept, how many tokens are, or None: nothing was asked.

        answer: tokens behind the prompt whose rows are there, too. head: how many first tokens the store lacks the rows
        of, that later requests will load. built_on: the level of rows that were loaded, by whether vLLM had some.
        """
        candidate = self._candidates.pop(request_id, None)
        if head and is_computed and not self._trouble and self._mode in ("asked", "all"):
            self._saves.append(PageSave(request_id, tuple(prompt[:head]), tuple(blocks), way="exact"))
            return head
        if candidate is None:
            return None
        why = candidate.trouble
        if not why and not is_computed:
            why = "it ended before its prompt was computed"
        if not why and len(prompt) < self._least:
            why = f"its prompt has fewer than {self._least} tokens"
        document = candidate.document if self._mode == "named" else ""
        if not why and candidate.grows:
            level, ids = built_on(candidate.had) if built_on else None, (*prompt, *answer)
            told = event() if event else None
            self._saves.append(PageSave(request_id, ids, tuple(blocks), told, way="grown", level=level))
            return len(ids)
        if not why:
            told = event() if event else None
            head = candidate.head if document else 0
            self._saves.append(PageSave(request_id, tuple(prompt), tuple(blocks), told, document, head=head))
        elif document:
            self._saves.append(PageSave(request_id, (), (), document=document, trouble=why))
        return why or len(prompt)

    def take(self) -> list[PageSave]:
        """What was decided to be kept since the last call."""
        saves, self._saves = self._saves, []
        return saves
