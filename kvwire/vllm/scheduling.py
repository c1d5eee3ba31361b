"""The scheduler's half of the connector, without vLLM: which requests begin with documents, and what is promised."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, KvwireError
from kvwire.types import digest_tokens
from kvwire.vllm.requests import PARAMS, Choice, entries_of, salt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry

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
        salt: Names the documents, and all that their cache depends on.
        left_s: Seconds until the deadline; None: there is none.
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


@dataclass(eq=False)
class _Asked:
    """One request. lengths: of the documents at the prompt's front that can be promised, once they are known."""

    prompt: tuple[int, ...]
    salt: str
    arrived: float
    choice: Choice | None = None
    looking: Future[list[CatalogEntry | None]] | None = None
    lengths: tuple[int, ...] | None = None
    computed: int = 0
    loads: int = 0
    told: dict[str, Any] = field(default_factory=dict)


class Scheduling:
    """Decides, request by request, how many tokens are promised. Called from one thread."""

    def __init__(self, corpus: Corpus, *, patience_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Ask nothing yet.

        Args:
            corpus: The documents', opened without an engine.
            patience_s: Longest wait for the catalog; a request is served without documents then.
            clock: Seconds.
        """
        self._corpus, self._patience_s, self._clock = corpus, patience_s, clock
        self._pool = ThreadPoolExecutor(_LOOK_UPS, "kvwire-look-up")
        self._asked: dict[str, _Asked] = {}
        self._loads: list[PageLoad] = []

    def begin(self, request_id: str, params: dict[str, Any] | None, prompt: Sequence[int], salt: str | None) -> None:
        """Take in a request, and begin to look its documents up.

        Args:
            request_id: Its name.
            params: Its ``kv_transfer_params``; without ``kvwire`` it is none of ours.
            prompt: Token ids.
            salt: Its ``cache_salt``.
        """
        if not params or PARAMS not in params:
            return
        asked = self._asked[request_id] = _Asked(tuple(prompt), salt or "", self._clock())
        try:
            asked.choice = Choice.read(params[PARAMS])
        except ArgumentError as error:
            self._refuse(request_id, asked, str(error))
            return
        asked.looking = self._pool.submit(entries_of, self._corpus, asked.choice)

    def promised(self, request_id: str, computed: int, preemptions: int = 0) -> int | None:
        """How many tokens behind those that are computed will be loaded.

        A load that brought nothing is not begun again, for which vLLM would ask for ever; one whose pages were taken
        away is.

        Args:
            request_id: Of the request.
            computed: Tokens of its prompt that vLLM has already.
            preemptions: How often the request lost its pages.

        Returns:
            Tokens; None where the catalog has not answered yet.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return 0
        if asked.lengths is None:
            if asked.looking is not None and not self._is_answered(asked):
                return None
            asked.lengths = self._lengths(request_id, asked)
        if asked.loads > preemptions:
            return 0
        asked.computed = computed
        return max(0, sum(asked.lengths) - computed)

    def allocated(self, request_id: str, blocks: Sequence[int], tokens: int) -> None:
        """Note where tokens go that were promised.

        Args:
            request_id: Of the request.
            blocks: All of its blocks.
            tokens: To load; 0: none.
        """
        asked = self._asked.get(request_id)
        if asked is None or not tokens or not asked.lengths or asked.choice is None:
            return
        start, first, position = asked.computed, 0, 0
        while position + asked.lengths[first] <= start:
            position += asked.lengths[first]
            first += 1
        texts, at = [], position
        for length in asked.lengths[first:]:
            texts.append(asked.prompt[at : at + length])
            at += length
        deadline_s = asked.choice.deadline_s
        left_s = None if deadline_s is None else deadline_s - (self._clock() - asked.arrived)
        names = asked.choice.documents[first : first + len(texts)]
        load = PageLoad(
            request_id, asked.choice, names, tuple(texts), position, start, start + tokens, tuple(blocks), asked.salt,
            left_s,
        )  # fmt: skip
        self._loads.append(load)
        asked.loads += 1
        asked.told["promised_tokens"] = asked.told.get("promised_tokens", 0) + tokens

    def take(self) -> list[PageLoad]:
        """Loads that were noted since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def end(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request.

        Args:
            request_id: Of the request.

        Returns:
            What its answer says in ``kv_transfer_params``; None where it is none of ours.
        """
        asked = self._asked.pop(request_id, None)
        return None if asked is None else {PARAMS: asked.told}

    def close(self) -> None:
        """End the look-ups."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_answered(self, asked: _Asked) -> bool:
        is_late = self._clock() - asked.arrived > self._patience_s
        return is_late or (asked.looking is not None and asked.looking.done())

    def _lengths(self, request_id: str, asked: _Asked) -> tuple[int, ...]:
        """Lengths of the documents that the prompt begins with, as far as the catalog has their blobs."""
        if asked.choice is None or asked.looking is None:
            return ()
        if not asked.looking.done():
            asked.looking.cancel()
            asked.told["trouble"] = f"the catalog did not answer within {self._patience_s:g} s"
            return ()
        try:
            entries = asked.looking.result()
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler would end with it
            asked.told["trouble"] = str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"
            return ()
        corpus = self._corpus
        wanted = salt_of(asked.choice, corpus.catalog.tenant, corpus.meta.config_digest(), entries)
        asked.told["cache_salt"] = wanted
        if asked.salt != wanted:
            self._refuse(
                request_id,
                asked,
                f"a request for linked documents needs the cache_salt that names them, or others would get its cache: "
                f'send "cache_salt": "{wanted}" (kvwire salt prints it)',
            )
            return ()
        return self._matching(asked, asked.choice, entries)

    def _matching(self, asked: _Asked, choice: Choice, entries: Sequence[CatalogEntry | None]) -> tuple[int, ...]:
        lengths: list[int] = []
        position = 0
        for name, entry in zip(choice.documents, entries, strict=True):
            if entry is None or entry.is_text:
                asked.told["trouble"] = f"document {name!r} has no blob in the catalog: encode it; it is computed"
                break
            stop = position + entry.tokens
            if digest_tokens(asked.prompt[position:stop]) != entry.token_digest:
                asked.told["trouble"] = (
                    f"from token {position} on the prompt is not the text of document {name!r}: send the documents' "
                    "token ids as they were encoded (kvwire.vllm.request_body); what follows is computed"
                )
                break
            lengths.append(entry.tokens)
            position = stop
        return tuple(lengths)

    def _refuse(self, request_id: str, asked: _Asked, why: str) -> None:
        """Have a request computed, and its answer say why: vLLM gives a connector no way to refuse it."""
        asked.told["refused"] = why
        _LOG.warning("request %s is served without documents: %s", request_id, why)
