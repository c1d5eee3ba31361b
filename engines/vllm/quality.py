"""What linked documents lose, as ``kvwire check-model`` measured it: told, and refused beyond a bound."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.reports import LinkReport

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

    def expected_kl(self, level: str = "") -> float | None:
        """KL divergence from full prefill of documents that are linked at a level; None: it was not measured."""
        report = self._known()
        return None if report is None else report.levels.get(level, report.linked)

    def trouble(self, level: str = "") -> str:
        """Why documents are not to be linked, in words; empty where they may be."""
        if self._bound is None:
            return ""
        report, kl = self._known(), self.expected_kl(level)
        if report is None or kl is None:
            return f"what links lose was not measured, and link_bound is set: run kvwire check-model, or {_WAYS}"
        allowed = self._bound * report.no_documents
        if kl <= allowed:
            return ""
        return (
            f"linked documents lose a KL divergence of {kl:.3g} by kvwire check-model, and link_bound allows "
            f"{allowed:.3g}: what follows the first is computed; {_WAYS}"
        )

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
                "linked documents lose a KL divergence of %.3g by kvwire check-model, of %.3g that documents tell: %s; "
                "link_bound refuses such requests (told once)",
                report.linked, report.no_documents, _WAYS,
            )  # fmt: skip
