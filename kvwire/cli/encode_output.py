"""What ``kvwire encode`` shows of documents: lines, totals and progress, and the manifest."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kvwire.cli.printing import LevelTotals, describe
from kvwire.cli.say import error_as_data, say
from kvwire.errors import PartialError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvwire.offline import DocumentRef, Row
    from kvwire.runtime.coding import Encoded


def print_row(row: Row) -> None:
    """A line for a document that the store holds by now."""
    levels = "  ".join(f"{level.name} {level.bytes / 1e3:.0f} kB" for level in row.levels) or "kept as text"
    had = "  (had it already)" if row.status == "there already" else ""
    say(f"{row.id}: {row.tokens} tokens  {levels}{had}")


class EncodeOutput:
    """Takes rows as they come: a line each, the manifest, and at the end the levels, the failures and the error."""

    def __init__(self, refs: Sequence[DocumentRef], manifest: str | None, *, method: str, as_json: bool) -> None:
        """Print nothing yet."""
        self._refs, self._manifest, self._as_json = refs, manifest, as_json
        self._totals = LevelTotals(method)
        self._failures: dict[str, str] = {}
        self._documents: list[dict[str, Any]] = []
        self._done = 0

    def take(self, rows: Iterable[tuple[Row, Encoded | None]]) -> None:
        """Print and keep rows until they end."""
        from tqdm import tqdm

        from kvwire.offline import writing

        total = sum(ref.size for ref in self._refs)
        manifest = writing(self._manifest) if self._manifest else nullcontext()
        bar = tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="encoding", file=sys.stderr)
        with manifest as writer, bar:
            tokens = 0
            for ref, (row, encoded) in zip(self._refs, rows, strict=True):
                tokens += row.tokens
                bar.set_postfix(documents=self._done + len(self._failures) + 1, tokens=tokens, refresh=False)
                bar.update(ref.size)
                if writer is not None:
                    writer.add(row)
                with tqdm.external_write_mode():
                    self._tell(row, encoded)

    def fail_all(self, rows: Iterable[Row]) -> None:
        """Write a manifest of documents of which none was tried; where some were, there is none."""
        from kvwire.offline import writing

        if self._manifest and not (self._done or self._failures):
            with writing(self._manifest) as writer:
                for row in rows:
                    writer.add(row)

    def end(self) -> PartialError | None:
        """Print levels and failures."""
        error = None
        if self._failures:
            failed = len(self._failures)
            error = PartialError(f"{failed} of {self._done + failed} documents were left out")
        if self._as_json:
            say(json.dumps({"documents": self._documents, "failures": self._failures} | error_as_data(error)))
        else:
            self._totals.print()
        for document_id, problem in self._failures.items():
            say(f"kvwire: {document_id}: {problem}", err=True)
        return error

    def _tell(self, row: Row, encoded: Encoded | None) -> None:
        if row.status == "failed":
            name = row.id if row.id not in self._failures else f"{row.id} ({row.source})"
            self._failures[name] = row.problem
            return
        self._done += 1
        if self._as_json:
            self._documents.append(_described(row, encoded))
            return
        if row.levels:
            levels = [(level.name, level.bytes, level.error, level.kl) for level in row.levels]
            elements = round(8 * row.levels[0].bytes / row.levels[0].bits_per_element)
            self._totals.add(row.tokens, elements, levels)
        print_row(row)


def _described(row: Row, encoded: Encoded | None) -> dict[str, Any]:
    """A document as JSON: its blob's header where that is at hand, else its row."""
    if encoded is None:
        return json.loads(row.to_json())  # type: ignore[no-any-return]
    known = describe(encoded.blob) if encoded.blob else {"tokens": row.tokens, "text_only": encoded.entry.is_text}
    return {"id": row.id, "skipped": encoded.skipped, "seconds": encoded.encode_s} | known
