"""What the command line shows of blobs and answers, to people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvwire.cli.say import error_as_data, say, say_text
from kvwire.codec import DEFAULT_METHOD, error_of_method

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.errors import KvwireError
    from kvwire.runtime.answer import Answer, Reuse
    from kvwire.types import BlobInfo


_LEVEL = {
    "name": "name", "step": "step", "bytes": "bytes", "cumulative_bytes": "cumulative_bytes",
    "bits_per_element": "bits_per_element", "measured_error": "measured_error", "predicted_kl": "predicted_kl",
    "alone": "independent", "lossless": "lossless",
}  # fmt: skip
"""What JSON says of a level, and where that is."""
_TIMES = ("ttft_s", "fetch_s", "decode_s", "recompute_s", "link_s", "repair_s", "front_s", "query_s")
_PARTS = {"front": "layout", "query": "question"}
"""What people are told of times, where that is not their name."""


def describe(info: BlobInfo) -> dict[str, Any]:
    """A blob's header as plain data."""
    names = ("tokens", "chunks", "chunk_tokens", "method", "opening", "context_level")
    return {name: getattr(info, name) for name in names} | {
        "bytes": info.file_bytes,
        "head_bytes": info.header_bytes,
        "model": info.meta.model_id,
        "model_revision": info.meta.model_revision,
        "profile": info.profile_digest,
        "error_of": error_of_method(info.method),
        "head_start": info.prefix_layers,
        "neutral_prefix": len(info.neutral_prefix),
        "soft_tokens": info.soft_tokens.digest if info.soft_tokens else None,
        "prefix_tokens": info.prefix.tokens if info.prefix else 0,
        "deviation_block": info.deviation.block if info.deviation else None,
        "levels": [{name: getattr(level, field) for name, field in _LEVEL.items()} for level in info.levels],
    }


class LevelTotals:
    """The levels of blobs added up, one blob after another."""

    def __init__(self, method: str = DEFAULT_METHOD) -> None:
        """Begin with none."""
        self._method = method
        self._tokens = self._elements = 0
        self._names: list[str] = []
        self._sums: list[tuple[int, float, float | None]] = []

    def add(self, tokens: int, elements: int, levels: Sequence[tuple[str, int, float, float | None]]) -> None:
        """Add one blob."""
        found = [(size, error * tokens, None if kl is None else kl * tokens) for _, size, error, kl in levels]
        if not self._tokens:
            self._names, self._sums = [name for name, *_ in levels], found
        else:
            self._sums = [
                (size + more, error + its, None if kl is None or what is None else kl + what)
                for (size, error, kl), (more, its, what) in zip(self._sums, found, strict=False)
            ]
        self._tokens += tokens
        self._elements += elements

    def print(self) -> None:
        """A row for each level that all blobs have; nothing where there are no blobs."""
        if not self._tokens:
            return
        say("", f"{'level':<12}{'bytes':>12}{'bits/element':>14}{'error':>10}{'KL':>10}")
        for name, (size, error, kl) in zip(self._names, self._sums, strict=False):
            bits = f"{8 * size / self._elements:>14.3f}" if self._elements else f"{'-':>14}"
            shown = f"{'-':>10}" if kl is None else f"{kl / self._tokens:10.1e}"
            say(f"{name:<12}{size:>12,}{bits}{error / self._tokens:>10.5f}{shown}")
        say(
            "bytes: of what a reader of the level fetches, header and index included; error: "
            f"{error_of_method(self._method)}; KL: what it is expected to change the next token's distribution by, in "
            "nats"
        )


def print_levels(infos: Sequence[BlobInfo]) -> None:
    """One row for each level, blobs added up."""
    totals = LevelTotals(infos[0].method if infos else DEFAULT_METHOD)
    for info in infos:
        levels = [(e.name, e.cumulative_bytes, e.measured_error, e.predicted_kl) for e in info.levels]
        totals.add(info.tokens, info.tokens * info.meta.elements_per_token, levels)
    totals.print()


def print_answer(names: Sequence[str], answer: Answer, *, as_json: bool, error: KvwireError | None = None) -> None:
    """Decisions, misses, where the time went, and the text."""
    timing = answer.timing
    if as_json:
        say(json.dumps(_described_answer(names, answer) | error_as_data(error)))
        return
    for decision in answer.decisions:
        what = "recompute" if decision.action == "recompute" else f"level {decision.level}"
        say(f"{names[decision.chunk.document]} chunk {decision.chunk.chunk}: {what}  ({decision.reason})")
    for miss in answer.misses:
        say(f"kvwire: {_outcome(names, answer, miss)}{miss}", err=True)
    times = {name.removesuffix("_s"): getattr(timing, name) * 1e3 for name in _TIMES[1:]}
    spent = ", ".join(
        f"{_PARTS.get(name, name)} {ms:.0f}" for name, ms in times.items() if name != "front" or answer.computed
    )
    say("", f"first token after {timing.ttft_s * 1e3:.0f} ms: {spent} ms (parts overlap)")
    for line in _reused(answer.reused):
        say(line)
    if answer.computed:
        say(f"{answer.computed} tokens around the documents computed before the question")
    if answer.shifted:
        say(f"{answer.shifted} of {answer.prompt.cache.tokens} tokens moved by the learnt mean shift of links")
    if answer.repair is not None:
        rows, total = len(answer.repair.rows), answer.prompt.cache.tokens
        kept = f", {answer.repair.kept} as an earlier repair left them" if answer.repair.kept else ""
        beside = f", {answer.repair.beside} while later documents were fetched" if answer.repair.beside else ""
        cut = "; others were left as they are, for want of time" if answer.repair.is_cut else ""
        say(f"{rows} of {total} rows computed anew, chosen by {answer.repair.selector}{kept}{beside}{cut}")
    for line in _expected_kl(names, answer):
        say(line)
    if answer.link_warning:
        say(f"kvwire: {answer.link_warning}", err=True)
    say(f"{answer.bytes / 1e3:.0f} kB fetched; {answer.reason}", "")
    say_text(answer.text)


def _described_answer(names: Sequence[str], answer: Answer) -> dict[str, Any]:
    decisions = [
        {"document": names[d.chunk.document], "chunk": d.chunk.chunk, "action": d.action, "level": d.level,
         "reason": d.reason}
        for d in answer.decisions
    ]  # fmt: skip
    repair = answer.repair and {
        "selector": answer.repair.selector,
        "rows": answer.repair.rows.tolist(),
        "kept_rows": answer.repair.kept,
        "rows_beside_link": answer.repair.beside,
        "is_cut": answer.repair.is_cut,
        "select_s": answer.repair.select_s,
        "compute_s": answer.repair.compute_s,
        "token_layers": answer.repair.cost.token_layers,
    }
    return {
        "text": answer.text, "tokens": list(answer.tokens), "decisions": decisions, "bytes": answer.bytes,
        "misses": list(answer.misses), "reason": answer.reason, "predicted_s": answer.predicted_s,
        "measured_error": answer.error, "expected_kl": answer.expected_kl,
        "documents": [
            {"document": name, "expected_kl": kl} for name, kl in zip(names, answer.document_kl, strict=True)
        ],
        "repair": repair, "link_warning": answer.link_warning,
        "computed_tokens": answer.computed, **({"reused": asdict(answer.reused)} if answer.reused else {}),
        "shifted_tokens": answer.shifted, **{name: getattr(answer.timing, name) for name in _TIMES},
    }  # fmt: skip


def _reused(reused: Reuse | None) -> Iterator[str]:
    """Where a prompt's tokens came from, and what became of it."""
    if reused is None:
        return
    where = f"from {reused.document}" if reused.document else "from the store, which has nothing that begins so"
    if reused.donors:
        where = "from " + ", ".join(f"{name} ({tokens})" for name, tokens in reused.donors)
        error = "never measured" if reused.error is None else f"KL {reused.error:.2g} when the model was checked"
        yield f"edited: {reused.holes} tokens in holes, {reused.repaired} rows computed anew; what edits lose: {error}"
    yield f"{reused.loaded} tokens of the prompt {where}, {reused.computed} computed"
    if reused.saved:
        yield f"kept as {reused.saved}"


def _expected_kl(names: Sequence[str], answer: Answer) -> Iterator[str]:
    """What levels are expected to change the next token's distribution by, and where that is not known."""
    known = [(name, kl) for name, kl in zip(names, answer.document_kl, strict=True) if kl is not None]
    unknown = dict.fromkeys(name for name, kl in zip(names, answer.document_kl, strict=True) if kl is None)
    each = ", ".join(f"{name} {kl:.1e}" for name, kl in known)
    if answer.expected_kl is not None:
        yield f"expected KL {answer.expected_kl:.1e} nats" + (f": {each}" if len(known) > 1 else "")
    elif unknown:
        told = f"; {each}" if each else ""
        yield (
            f"expected KL not known: {', '.join(unknown)} was encoded without a calibration, so that no floor by KL "
            f"held; encode it again to have one{told}"
        )


def _outcome(names: Sequence[str], answer: Answer, miss: str) -> str:
    """What became of the chunks, or of the document, that a miss names; nothing where it is of the load as a whole."""
    found = [f"{names[d.chunk.document]} chunk {d.chunk.chunk}: " for d in answer.decisions]
    of_chunk = [d for d, name in zip(answer.decisions, found, strict=True) if miss.startswith(name)]
    of_document = [d for d in answer.decisions if miss.startswith(f"{names[d.chunk.document]}: ")]
    levels = {d.level for d in of_chunk or of_document}
    if not levels:
        return ""
    if levels == {None}:
        return "recomputed: "
    used = ", ".join(str(level) for level in sorted(level for level in levels if level is not None))
    return f"used at level {used}" + (" and recomputed in part: " if None in levels else ": ")
