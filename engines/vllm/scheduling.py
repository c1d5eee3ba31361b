"""The scheduler's half of the connector, without vLLM: which requests begin with documents, and what is promised."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, AuthError, KvwireError
from kvwire.runtime.threads import DaemonThreads

from .matching import match_documents, match_prefix
from .outcomes import LoadOutcome, RequestOutcome
from .prefetching import NO_CACHE, PrefetchHint, has_cache
from .quality import LinkQuality
from .requests import OWN, PARAMS, SALTED, Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvwire.runtime.corpus import Corpus
    from kvwire.store import KeptRepair

    from .matching import MatchResult, Piece

_LOOK_UPS = 8
"""Threads that ask the catalog; more requests wait for these."""
_FAILURES = 3
"""So many failures in a row pause the store: one may be an object's, three are the store's."""
_OF_STORES = (AuthError, OSError)
"""Others are of one request or one document, and say nothing of the store."""
_LOG = logging.getLogger("kvwire.vllm")


@dataclass(frozen=True)
class PageLoad:
    """What a worker is to load."""

    request_id: str  # whose
    choice: Choice  # how
    documents: tuple[str, ...]  # ids of documents, in the prompt's order: those that hold any token to load
    texts: tuple[tuple[int, ...], ...]  # token ids of each
    position: int  # the prompt's token at which the first of them begins
    start: int  # first token of the prompt to load
    stop: int  # behind the last one
    # the request's, from its first token on; a list for each of the worker's tables
    blocks: tuple[tuple[int, ...], ...]
    salt: str  # names mode and quality, and in documents mode all that their cache depends on
    left_s: float | None  # seconds until the deadline; None: there is none
    # repaired rows to be laid over the documents, which then are all that it names; None: none
    kept: KeptRepair | None = None
    number: int = 0  # of the load, among the request's
    front: int = 0  # how many of the documents, the first ones, stand before those that the request names


@dataclass(eq=False)
class _RequestState:
    """One request. pieces: of documents at the prompt's front that can be promised, once they are known."""

    prompt: tuple[int, ...]
    salt: str
    arrived: float
    choice: Choice | None = None
    looking: Future[MatchResult] | None = None
    pieces: tuple[Piece, ...] | None = None
    kept: KeptRepair | None = None
    computed: int = 0
    loads: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    front: int = 0
    lacks_head: bool = False
    outcome: RequestOutcome = field(default_factory=RequestOutcome)
    needs_own_salt: bool = False

    @property
    def fails(self) -> bool:
        """Something kept the request from the rows that it asked for."""
        return "refused" in self.report or (
            "trouble" in self.report and self.choice is not None and bool(self.choice.mode)
        )


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
        self._requests: dict[str, _RequestState] = {}
        self._loads: list[PageLoad] = []
        self._hints: list[PrefetchHint] = []

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
        state = self._requests[request_id] = _RequestState(tuple(prompt), salt or "", self._clock())
        try:
            state.choice = Choice.read(params[PARAMS])
        except ArgumentError as error:
            self._refuse(request_id, state, str(error))
            return None
        if state.choice.prefetch and has_cache(self._corpus):
            self._hints.append(PrefetchHint(state.choice.prefetch, state.choice.level))
        elif state.choice.prefetch:
            state.report["not_soon"] = NO_CACHE
        trouble = trouble or (self._paused() if state.choice.mode else "")
        if trouble:
            state.report["trouble"] = trouble
        elif state.choice.mode == "documents":
            state.looking = self._pool.submit(match_documents, self._corpus, state.choice, state.prompt, self._quality)
        elif state.choice.mode == "prefix":
            state.looking = self._pool.submit(match_prefix, self._corpus, self._index, state.choice, state.prompt)
        return state.choice

    def promised(self, request_id: str, computed: int, preemptions: int = 0) -> int | None:
        """How many tokens behind those that are computed will be loaded.

        A load that brought nothing is not begun again, for which vLLM would ask for ever; one whose pages were taken
        away is.
        """
        state = self._requests.get(request_id)
        if state is None:
            return 0
        if state.pieces is None:
            if state.looking is not None and not self._is_answered(state):
                return None
            state.pieces = self._matching(request_id, state)
        if state.loads > preemptions:
            return 0
        state.computed = computed
        most = len(state.prompt) - 1  # vLLM computes the last token, and drops rows that its window has left before
        if self._is_strict and state.fails:  # a load that brings nothing: vLLM fails the request for it
            return max(most - computed, 0)
        tokens = min(sum(piece.tokens for piece in state.pieces), most) - computed
        least = self._least_tokens if state.choice and state.choice.prefix else 1
        return tokens if tokens >= least else 0

    def allocated(self, request_id: str, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """Note where tokens go that were promised; blocks: see ``PageLoad``."""
        state = self._requests.get(request_id)
        if state is None or not tokens:
            return
        choice, pieces = state.choice or Choice(), () if self._is_strict and state.fails else state.pieces or ()
        start, first, position = state.computed, 0, 0
        while pieces and state.kept is None and position + pieces[first].tokens <= start:
            position += pieces[first].tokens
            first += 1
        pieces, deadline_s = pieces[first:], choice.deadline_s
        left_s = None if deadline_s is None else deadline_s - (self._clock() - state.arrived)
        load = PageLoad(
            request_id, choice, tuple(piece.document_id for piece in pieces),
            tuple(piece.token_ids for piece in pieces), position, start, start + tokens,
            tuple(map(tuple, blocks)), state.salt, left_s, state.kept, state.loads, state.front,
        )  # fmt: skip
        self._loads.append(load)
        state.loads += 1
        state.report["promised_tokens"] = state.report.get("promised_tokens", 0) + tokens

    def take(self) -> list[PageLoad]:
        """Loads that were noted since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def take_hints(self) -> list[PrefetchHint]:
        """What is to be fetched ahead since the last call."""
        hints, self._hints = self._hints, []
        return hints

    def loaded(self, request_id: str, outcome: LoadOutcome) -> None:
        """Take in what became of a load."""
        if outcome.lost and not (outcome.loaded or outcome.bytes):
            self._failed()
        elif outcome.bytes:
            self._failures = 0
        if state := self._requests.get(request_id):
            state.outcome.add(outcome)

    def own_salt(self, request_id: str) -> str | None:
        """A salt for a request whose own one names documents that it does not get; None: it may keep that.

        What is computed for another text, or without the documents, would answer later requests. It is told once.
        """
        state = self._requests.get(request_id)
        if state is None or not state.needs_own_salt:
            return None
        state.needs_own_salt = False
        return salt_apart(state.salt, state.prompt)

    def missing_head(self, request_id: str) -> int:
        """How many first tokens of a request's prompt its documents stand behind, and the store lacks the rows of."""
        state = self._requests.get(request_id)
        return state.choice.head if state is not None and state.lacks_head and state.choice else 0

    def built_on(self, request_id: str, *, had: bool) -> int | None:
        """The coarsest level that rows of a request are of, or were computed over; None: all were computed here.

        had: vLLM had some in its memory, under a salt that names the level.
        """
        state = self._requests.get(request_id)
        if state is None or state.choice is None:
            return None
        report = state.outcome.report()
        levels = [state.choice.level if had else None]
        levels += [report.get("level"), state.context] if report.get("loaded_tokens") else []
        return min((each for each in levels if each is not None), default=None)

    def end(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        report = state.outcome.report() | state.report
        words = (
            f"{report.get('loaded_tokens', 0)} of {report.get('promised_tokens', 0)} promised tokens were loaded"
            f" at level {report.get('level', '-')}, {report.get('bytes', 0)} bytes"
        )  # streams carry no parameters back: the log tells their clients' operators
        if trouble := report.get("trouble"):
            _LOG.warning("request %s: %s: %s", request_id, words, trouble)
        else:
            _LOG.info("request %s: %s", request_id, words)
        return {PARAMS: report}

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

    def _is_answered(self, state: _RequestState) -> bool:
        is_late = self._clock() - state.arrived > self._patience_s
        return is_late or (state.looking is not None and state.looking.done())

    def _matching(self, request_id: str, state: _RequestState) -> tuple[Piece, ...]:
        """What the prompt begins with, as far as it can be loaded."""
        state.needs_own_salt = names_documents(state.salt)
        if state.choice is None or state.looking is None:
            return ()
        if not state.looking.done():
            state.looking.cancel()
            self._failed()
            state.report["trouble"] = f"the catalog did not answer within {self._patience_s:g} s"
            return ()
        try:
            matched = state.looking.result()
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler would end with it
            if isinstance(error, _OF_STORES):
                self._failed()
            state.report["trouble"] = (
                str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"
            )
            return ()
        self._failures = 0
        state.report["cache_salt"] = matched.salt
        state.lacks_head = matched.lacks_head
        if matched.refused:
            self._refuse(request_id, state, matched.refused)
            return ()
        if state.salt.partition(OWN)[0] != matched.salt:
            missing = f"{matched.trouble}. " if matched.trouble and not matched.pieces else ""
            self._refuse(
                request_id,
                state,
                f"{missing}A request for linked documents or for stored prefixes needs the cache_salt that names them, "
                f'or others would get its cache: send "cache_salt": "{matched.salt}" (kvwire salt prints it)',
            )
            return ()
        state.needs_own_salt &= matched.is_other_text
        if matched.trouble:
            state.report["trouble"] = matched.trouble
        state.kept, state.context, state.front = matched.kept, matched.context, matched.front
        if matched.expected_kl is not None:
            state.report["expected_kl"] = round(matched.expected_kl, 5)
        return matched.pieces

    def _refuse(self, request_id: str, state: _RequestState, why: str) -> None:
        """Have a request computed, and its answer say why: vLLM gives a connector no way to refuse it."""
        state.report["refused"] = why
        _LOG.warning("request %s is served without documents: %s", request_id, why)


def salt_apart(salt: str, prompt: Sequence[int]) -> str:
    """A salt for what is computed of this prompt alone, where the request's own names documents."""
    named, mark, own = salt.partition(OWN)
    return f"{named}-other-{hashlib.sha256(repr(tuple(prompt)).encode()).hexdigest()[:16]}{mark}{own}"


def names_documents(salt: str | None) -> bool:
    """Whether a salt is one of kvwire's for linked documents."""
    named = (salt or "").partition(OWN)[0]
    return named.startswith(f"{SALTED}documents-") and "-other-" not in named
