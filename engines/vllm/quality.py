"""What linked documents lose, as ``kvwire check-model`` measured it: told, and refused beyond a bound."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, KvwireError, NotFoundError
from kvwire.store import read_ahead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.reports import LinkReport
    from kvwire.store import CatalogEntry

_MOST = 4096
"""Blobs of which it is remembered how they were computed."""
_LOG = logging.getLogger("kvwire.vllm")
_WAYS = 'ask for rows that were repaired elsewhere ("repair": "kept"), for a prefix, or for the first document alone'


class LinkQuality:
    """A model's report, read once. Any thread may ask."""

    def __init__(self, corpus: Corpus, bound: float | None = None) -> None:
        """bound: of what documents tell a question, the share that links may lose; None: any."""
        self._corpus, self._bound = corpus, bound
        self._lock = threading.Lock()
        self._is_read = False
        self._report: LinkReport | None = None
        self._behind: dict[str, bool] = {}  # by a blob's key: whether it was computed behind a neutral prefix

    def of_links(self, entries: Sequence[CatalogEntry], level: str = "") -> tuple[float | None, str]:
        """What documents lose that are linked at a level.

        Gives the KL divergence from full prefill, None where it was not measured; and why they are not to be linked, in
        words, empty where they may be.
        """
        report = self._known()
        if report is None or (apart := self._apart(report, entries)):
            how = "" if report is None else apart
            why = f"what links lose was not measured{how}, and link_bound is set: run kvwire check-model, or {_WAYS}"
            return None, "" if self._bound is None else why
        kl = report.levels.get(level, report.linked)
        if self._bound is None or kl <= (allowed := self._bound * report.no_documents):
            return kl, ""
        return None, (
            f"linked documents lose a KL divergence of {kl:.3g} by kvwire check-model, and link_bound allows "
            f"{allowed:.3g}: what follows the first is computed; {_WAYS}"
        )

    def _apart(self, report: LinkReport, entries: Sequence[CatalogEntry]) -> str:
        """Where documents were computed in another way than those that were measured, in words; else empty."""
        known = {entry.blob_key: self._behind.get(entry.blob_key) for entry in entries}
        new = {entry.blob_key: entry for entry in entries if known[entry.blob_key] is None}
        reads = read_ahead(self._corpus.catalog.store, list(new), lambda key: self._corpus.read_header(new[key]))
        for key, read in reads:
            with suppress(KvwireError):  # a blob that is lost is computed, whatever it was
                info = read()
                known[key] = len(info.neutral_prefix) > info.opening
        ways = {is_behind for is_behind in known.values() if is_behind is not None}
        if len(self._behind) > _MOST:
            self._behind.clear()
        self._behind |= {key: is_behind for key, is_behind in known.items() if is_behind is not None}
        if ways <= {report.neutral > 0}:
            return ""
        return f" of documents {_how(is_behind=not report.neutral)}"

    def _known(self) -> LinkReport | None:
        with self._lock:
            if not self._is_read:
                try:
                    self._report = self._corpus.link_report()
                except (CorruptError, NotFoundError) as error:
                    _LOG.warning("what links lose is not known: %s", error)
                self._is_read = True
                self._warn()
        return self._report

    def _warn(self) -> None:
        report = self._report
        if report is not None and self._bound is None and not report.is_within:
            _LOG.warning(
                "linked documents, %s, lose a KL divergence of %.3g by kvwire check-model, of %.3g that documents tell "
                "a question: %s; link_bound refuses such requests (told once)",
                _how(is_behind=report.neutral > 0), report.linked, report.no_documents, _WAYS,
            )  # fmt: skip


def _how(*, is_behind: bool) -> str:
    """How documents were computed, in words."""
    return "computed behind a neutral prefix" if is_behind else "computed alone"
