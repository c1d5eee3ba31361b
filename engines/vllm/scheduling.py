"""The scheduler's half of the connector, without vLLM: which requests begin with documents, and what is promised."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, KvwireError

from .matching import match_documents, match_prefix
from .requests import PARAMS, Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.runtime.corpus import Corpus
    from kvwire.store import KeptRepair

    from .matching import Matched, Piece

_LOOK_UPS = 8
"""Threads that ask the catalog; more requests wait for these."""
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
        blocks: The request's, from its first token on.
        salt: Names mode and quality, and in documents mode all that their cache depends on.
        left_s: Seconds until the deadline; None: there is none.
        kept: Repaired rows to be laid over the documents, which then are all that it names; None: none.
    """

    request_id: str
    choice: Choice
    documents: tuple[str, ...]
    texts: tuple[tuple[int, ...], ...]
    position: int
    start: int
    stop: int
    blocks: tuple[int, ...]
    salt: str
    left_s: float | None
    kept: KeptRepair | None = None


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


class ConnectorScheduler:
    """Decides, request by request, how many tokens are promised. Called from one thread."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        patience_s: float = 5.0,
        index: str = "kvwire",
        least_tokens: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nothing yet."""
        self._corpus, self._patience_s, self._clock = corpus, patience_s, clock
        self._index, self._least_tokens = corpus.index(index), least_tokens
        self._pool = ThreadPoolExecutor(_LOOK_UPS, "kvwire-look-up")
        self._asked: dict[str, _Asked] = {}
        self._loads: list[PageLoad] = []

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
        if trouble:
            asked.told["trouble"] = trouble
        elif asked.choice.mode == "documents":
            asked.looking = self._pool.submit(match_documents, self._corpus, asked.choice, asked.prompt)
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
        tokens = sum(piece.tokens for piece in asked.pieces) - computed
        least = self._least_tokens if asked.choice and asked.choice.prefix else 1
        return tokens if tokens >= least else 0

    def allocated(self, request_id: str, blocks: Sequence[int], tokens: int) -> None:
        """Note where tokens go that were promised."""
        asked = self._asked.get(request_id)
        if asked is None or not tokens or not asked.pieces or asked.choice is None:
            return
        start, first, position = asked.computed, 0, 0
        while asked.kept is None and position + asked.pieces[first].tokens <= start:
            position += asked.pieces[first].tokens
            first += 1
        pieces = asked.pieces[first:]
        deadline_s = asked.choice.deadline_s
        left_s = None if deadline_s is None else deadline_s - (self._clock() - asked.arrived)
        load = PageLoad(
            request_id, asked.choice, tuple(piece.document_id for piece in pieces),
            tuple(piece.token_ids for piece in pieces), position, start, start + tokens, tuple(blocks), asked.salt,
            left_s, asked.kept,
        )  # fmt: skip
        self._loads.append(load)
        asked.loads += 1
        asked.told["promised_tokens"] = asked.told.get("promised_tokens", 0) + tokens

    def take(self) -> list[PageLoad]:
        """Loads that were noted since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def end(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return None
        trouble, promised = asked.told.get("trouble"), asked.told.get("promised_tokens", 0)
        if trouble:  # streams carry no parameters back: the log is where their clients' operators find it
            _LOG.warning("request %s: %d tokens were promised: %s", request_id, promised, trouble)
        else:
            _LOG.info("request %s: %d tokens were promised", request_id, promised)
        return {PARAMS: asked.told}

    def close(self) -> None:
        """End the look-ups."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_answered(self, asked: _Asked) -> bool:
        is_late = self._clock() - asked.arrived > self._patience_s
        return is_late or (asked.looking is not None and asked.looking.done())

    def _matching(self, request_id: str, asked: _Asked) -> tuple[Piece, ...]:
        """What the prompt begins with, as far as it can be loaded."""
        if asked.choice is None or asked.looking is None:
            return ()
        if not asked.looking.done():
            asked.looking.cancel()
            asked.told["trouble"] = f"the catalog did not answer within {self._patience_s:g} s"
            return ()
        try:
            matched = asked.looking.result()
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler would end with it
            asked.told["trouble"] = str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"
            return ()
        asked.told["cache_salt"] = matched.salt
        if asked.salt != matched.salt:
            missing = f"{matched.trouble}. " if matched.trouble and not matched.pieces else ""
            self._refuse(
                request_id,
                asked,
                f"{missing}A request for linked documents or for stored prefixes needs the cache_salt that names them, "
                f'or others would get its cache: send "cache_salt": "{matched.salt}" (kvwire salt prints it)',
            )
            return ()
        if matched.trouble:
            asked.told["trouble"] = matched.trouble
        asked.kept = matched.kept
        return matched.pieces

    def _refuse(self, request_id: str, asked: _Asked, why: str) -> None:
        """Have a request computed, and its answer say why: vLLM gives a connector no way to refuse it."""
        asked.told["refused"] = why
        _LOG.warning("request %s is served without documents: %s", request_id, why)
