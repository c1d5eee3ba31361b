"""The scheduler's half of the connector, without vLLM: which requests begin with documents, and what is promised."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, KvwireError
from kvwire.runtime.threads import DaemonThreads

from .matching import match_documents, match_prefix
from .outcomes import LoadOutcome, RequestOutcome
from .quality import LinkQuality
from .requests import OWN, PARAMS, SALTED, Choice
from .soon import NO_CACHE, Soon, has_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvwire.runtime.corpus import Corpus
    from kvwire.store import KeptRepair

    from .matching import Matched, Piece

_LOOK_UPS = 8
"""Threads that ask the catalog; more requests wait for these."""
_FAILURES = 3
"""So many failures in a row pause the store: one may be an object's, three are the store's."""
_LOG = logging.getLogger("kvwire.vllm")


@dataclass(frozen=True)
class PageLoad:
    """What a worker is to load.

    Attributes:
        request_id: Whose.
        choice: How.
        documents: Ids of documents, in the prompt's order: those that hold any token to load.
        texts: Token ids of each.
        position: The prompt's token at which the first of them begins.
        start: First token of the prompt to load.
        stop: Behind the last one.
        blocks: The request's, from its first token on; a list for each of the worker's tables.
        salt: Names mode and quality, and in documents mode all that their cache depends on.
        left_s: Seconds until the deadline; None: there is none.
        kept: Repaired rows to be laid over the documents, which then are all that it names; None: none.
        number: Of the load, among the request's.
        front: How many of the documents, the first ones, stand before those that the request names.
    """

    request_id: str
    choice: Choice
    documents: tuple[str, ...]
    texts: tuple[tuple[int, ...], ...]
    position: int
    start: int
    stop: int
    blocks: tuple[tuple[int, ...], ...]
    salt: str
    left_s: float | None
    kept: KeptRepair | None = None
    number: int = 0
    front: int = 0


@dataclass(eq=False)
class _Asked:
    """One request. pieces: of documents at the prompt's front that can be promised, once they are known."""

    prompt: tuple[int, ...]
    salt: str
    arrived: float
    choice: Choice | None = None
    looking: Future[Matched] | None = None
    pieces: tuple[Piece, ...] | None = None
    kept: KeptRepair | None = None
    computed: int = 0
    loads: int = 0
    told: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    front: int = 0
    lacks_head: bool = False
    outcome: RequestOutcome = field(default_factory=RequestOutcome)
    is_apart: bool = False

    @property
    def fails(self) -> bool:
        """Something kept the request from the rows that it asked for."""
        return "refused" in self.told or ("trouble" in self.told and self.choice is not None and bool(self.choice.mode))


class ConnectorScheduler:
    """Decides, request by request, how many tokens are promised. Called from one thread."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        patience_s: float = 5.0,
        pause_s: float = 10.0,
        is_strict: bool = False,
        index: str = "kvwire",
        least_tokens: int = 1,
        link_bound: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nothing yet.

        pause_s: how long a store that failed several times in a row is left alone. is_strict: requests that do not get
        what they ask for fail. link_bound: see ``LinkQuality``.
        """
        self._corpus, self._patience_s, self._clock = corpus, patience_s, clock
        self._pause_s, self._is_strict = pause_s, is_strict
        self._quality = LinkQuality(corpus, link_bound)
        self._failures, self._paused_until = 0, 0.0
        self._index, self._least_tokens = corpus.index(index), least_tokens
        self._pool = DaemonThreads(_LOOK_UPS, "kvwire-look-up")  # one in a hung store does not hold vLLM's end
        self._asked: dict[str, _Asked] = {}
        self._loads: list[PageLoad] = []
        self._hints: list[Soon] = []

    def begin(
        self,
        request_id: str,
        params: dict[str, Any] | None,
        prompt: Sequence[int],
        salt: str | None,
        trouble: str = "",
    ) -> Choice | None:
        """Take in a request, and begin to look up what it may begin with."""
        if not params or PARAMS not in params:
            return None
        asked = self._asked[request_id] = _Asked(tuple(prompt), salt or "", self._clock())
        try:
            asked.choice = Choice.read(params[PARAMS])
        except ArgumentError as error:
            self._refuse(request_id, asked, str(error))
            return None
        if asked.choice.soon and has_cache(self._corpus):
            self._hints.append(Soon(asked.choice.soon, asked.choice.level))
        elif asked.choice.soon:
            asked.told["not_soon"] = NO_CACHE
        trouble = trouble or (self._paused() if asked.choice.mode else "")
        if trouble:
            asked.told["trouble"] = trouble
        elif asked.choice.mode == "documents":
            asked.looking = self._pool.submit(match_documents, self._corpus, asked.choice, asked.prompt, self._quality)
        elif asked.choice.mode == "prefix":
            asked.looking = self._pool.submit(match_prefix, self._corpus, self._index, asked.choice, asked.prompt)
        return asked.choice

    def promised(self, request_id: str, computed: int, preemptions: int = 0) -> int | None:
        """How many tokens behind those that are computed will be loaded.

        A load that brought nothing is not begun again, for which vLLM would ask for ever; one whose pages were taken
        away is.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return 0
        if asked.pieces is None:
            if asked.looking is not None and not self._is_answered(asked):
                return None
            asked.pieces = self._matching(request_id, asked)
        if asked.loads > preemptions:
            return 0
        asked.computed = computed
        most = len(asked.prompt) - 1  # vLLM computes the last token, and drops rows that its window has left before
        if self._is_strict and asked.fails:  # a load that brings nothing: vLLM fails the request for it
            return max(most - computed, 0)
        tokens = min(sum(piece.tokens for piece in asked.pieces), most) - computed
        least = self._least_tokens if asked.choice and asked.choice.prefix else 1
        return tokens if tokens >= least else 0

    def allocated(self, request_id: str, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """Note where tokens go that were promised; blocks: see ``PageLoad``."""
        asked = self._asked.get(request_id)
        if asked is None or not tokens:
            return
        choice, pieces = asked.choice or Choice(), () if self._is_strict and asked.fails else asked.pieces or ()
        start, first, position = asked.computed, 0, 0
        while pieces and asked.kept is None and position + pieces[first].tokens <= start:
            position += pieces[first].tokens
            first += 1
        pieces, deadline_s = pieces[first:], choice.deadline_s
        left_s = None if deadline_s is None else deadline_s - (self._clock() - asked.arrived)
        load = PageLoad(
            request_id, choice, tuple(piece.document_id for piece in pieces),
            tuple(piece.token_ids for piece in pieces), position, start, start + tokens,
            tuple(map(tuple, blocks)), asked.salt, left_s, asked.kept, asked.loads, asked.front,
        )  # fmt: skip
        self._loads.append(load)
        asked.loads += 1
        asked.told["promised_tokens"] = asked.told.get("promised_tokens", 0) + tokens

    def take(self) -> list[PageLoad]:
        """Loads that were noted since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def take_hints(self) -> list[Soon]:
        """What is to be fetched ahead since the last call."""
        hints, self._hints = self._hints, []
        return hints

    def loaded(self, request_id: str, outcome: LoadOutcome) -> None:
        """Take in what became of a load."""
        if outcome.lost and not (outcome.loaded or outcome.bytes):
            self._failed()
        elif outcome.bytes:
            self._failures = 0
        if asked := self._asked.get(request_id):
            asked.outcome.add(outcome)

    def other_salt(self, request_id: str) -> str | None:
        """A salt for a request whose own one names documents that it does not get; None: it may keep that.

        What is computed for another text, or without the documents, would answer later requests. It is told once.
        """
        asked = self._asked.get(request_id)
        if asked is None or not asked.is_apart:
            return None
        asked.is_apart = False
        return apart(asked.salt, asked.prompt)

    def missing_head(self, request_id: str) -> int:
        """How many first tokens of a request's prompt its documents stand behind, and the store lacks the rows of."""
        asked = self._asked.get(request_id)
        return asked.choice.head if asked is not None and asked.lacks_head and asked.choice else 0

    def built_on(self, request_id: str, *, had: bool) -> int | None:
        """The coarsest level that rows of a request are of, or were computed over; None: all were computed here.

        had: vLLM had some in its memory, under a salt that names the level.
        """
        asked = self._asked.get(request_id)
        if asked is None or asked.choice is None:
            return None
        told = asked.outcome.told()
        levels = [asked.choice.level if had else None]
        levels += [told.get("level"), asked.context] if told.get("loaded_tokens") else []
        return min((each for each in levels if each is not None), default=None)

    def end(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return None
        told = asked.told = asked.outcome.told() | asked.told
        words = (
            f"{told.get('loaded_tokens', 0)} of {told.get('promised_tokens', 0)} promised tokens were loaded"
            f" at level {told.get('level', '-')}, {told.get('bytes', 0)} bytes"
        )  # streams carry no parameters back: the log tells their clients' operators
        if trouble := told.get("trouble"):
            _LOG.warning("request %s: %s: %s", request_id, words, trouble)
        else:
            _LOG.info("request %s: %s", request_id, words)
        return {PARAMS: told}

    def close(self) -> None:
        """End the look-ups."""
        self._pool.shutdown(wait=False)

    def _failed(self) -> None:
        self._failures += 1
        if self._failures == _FAILURES:
            _LOG.warning("the store failed %d times in a row: it is asked once in %g s", _FAILURES, self._pause_s)
        if self._failures >= _FAILURES:
            self._paused_until = self._clock() + self._pause_s

    def _paused(self) -> str:
        """Why the store is not asked, in words; after a pause one request asks it."""
        if self._failures < _FAILURES or not self._pause_s:
            return ""
        if self._clock() >= self._paused_until:
            self._paused_until = self._clock() + self._pause_s
            return ""
        return f"the store failed {self._failures} times in a row; it is asked once in {self._pause_s:g} s"

    def _is_answered(self, asked: _Asked) -> bool:
        is_late = self._clock() - asked.arrived > self._patience_s
        return is_late or (asked.looking is not None and asked.looking.done())

    def _matching(self, request_id: str, asked: _Asked) -> tuple[Piece, ...]:
        """What the prompt begins with, as far as it can be loaded."""
        asked.is_apart = names_documents(asked.salt)
        if asked.choice is None or asked.looking is None:
            return ()
        if not asked.looking.done():
            asked.looking.cancel()
            self._failed()
            asked.told["trouble"] = f"the catalog did not answer within {self._patience_s:g} s"
            return ()
        try:
            matched = asked.looking.result()
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler would end with it
            self._failed()
            asked.told["trouble"] = str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"
            return ()
        self._failures = 0
        asked.told["cache_salt"] = matched.salt
        asked.lacks_head = matched.lacks_head
        if matched.refused:
            self._refuse(request_id, asked, matched.refused)
            return ()
        if asked.salt.partition(OWN)[0] != matched.salt:
            missing = f"{matched.trouble}. " if matched.trouble and not matched.pieces else ""
            self._refuse(
                request_id,
                asked,
                f"{missing}A request for linked documents or for stored prefixes needs the cache_salt that names them, "
                f'or others would get its cache: send "cache_salt": "{matched.salt}" (kvwire salt prints it)',
            )
            return ()
        asked.is_apart &= matched.is_other_text
        if matched.trouble:
            asked.told["trouble"] = matched.trouble
        asked.kept, asked.context, asked.front = matched.kept, matched.context, matched.front
        if matched.expected_kl is not None:
            asked.told["expected_kl"] = round(matched.expected_kl, 5)
        return matched.pieces

    def _refuse(self, request_id: str, asked: _Asked, why: str) -> None:
        """Have a request computed, and its answer say why: vLLM gives a connector no way to refuse it."""
        asked.told["refused"] = why
        _LOG.warning("request %s is served without documents: %s", request_id, why)


def apart(salt: str, prompt: Sequence[int]) -> str:
    """A salt for what is computed of this prompt alone, where the request's own names documents."""
    named, mark, own = salt.partition(OWN)
    return f"{named}-other-{hashlib.sha256(repr(tuple(prompt)).encode()).hexdigest()[:16]}{mark}{own}"


def names_documents(salt: str | None) -> bool:
    """Whether a salt is one of kvwire's for linked documents."""
    named = (salt or "").partition(OWN)[0]
    return named.startswith(f"{SALTED}documents-") and "-other-" not in named
