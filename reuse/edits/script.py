"""Edit scripts: which tokens of a prompt stand in stored texts, and which have to be computed.

KVShare (arXiv 2503.16525) edits the cache of a similar request. A *donor* is such a text, a *span* a run of tokens that
it shares with the prompt, a *hole* what no span covers. Only equal tokens are reused, wherever they stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rapidfuzz.distance import LCSseq

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LEAST_SPAN = 4
"""Tokens of the shortest span: shorter ones gain less than they scatter the cache."""
MAX_SPANS = 4096
MAX_TOKENS = 1 << 20
_MAX_PAIRS = 1 << 31
"""Of tokens that are compared: an alignment takes a bit for each, so 256 MiB."""


class Span(NamedTuple):
    """Tokens that a prompt shares with a donor.

    Attributes:
        start: Position of the first in the prompt.
        at: Its position in the donor.
        tokens: How many.
        donor: Number of the donor.
    """

    start: int
    at: int
    tokens: int
    donor: int = 0

    @property
    def stop(self) -> int:
        """Position in the prompt behind the last."""
        return self.start + self.tokens


@dataclass(frozen=True)
class EditScript:
    """How a prompt is made of donors.

    Attributes:
        tokens: Length of the prompt.
        spans: By their place in the prompt; they do not overlap.
    """

    tokens: int
    spans: tuple[Span, ...] = field(default=())

    def __post_init__(self) -> None:
        """Refuse spans that overlap or lie outside of the prompt."""
        end = 0
        if not 0 < self.tokens <= MAX_TOKENS or len(self.spans) > MAX_SPANS:
            raise ArgumentError(f"an edit script is of 1 to {MAX_TOKENS} tokens and {MAX_SPANS} spans at most")
        for span in self.spans:
            if span.start < end or span.tokens < 1 or span.stop > self.tokens or min(span.at, span.donor) < 0:
                msg = f"{span} overlaps the span before it, or lies outside of a prompt of {self.tokens} tokens"
                raise ArgumentError(msg)
            end = span.stop

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """First token of each run that no span covers, and the one behind its last."""
        edges = [0, *(edge for span in self.spans for edge in (span.start, span.stop)), self.tokens]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return tuple((start, stop) for start, stop in pairs if start < stop)

    @property
    def reused(self) -> int:
        """Tokens in spans."""
        return sum(span.tokens for span in self.spans)

    @property
    def computed(self) -> int:
        """Tokens in holes."""
        return self.tokens - self.reused

    @property
    def exact(self) -> int:
        """First tokens of the prompt whose rows are a donor's own: they begin it, too, and nothing else precedes."""
        first = self.spans[0] if self.spans else Span(0, 1, 0)
        return first.tokens if first.start == first.at == 0 else 0

    @property
    def front(self) -> int:
        """First tokens whose rows are those of a prefill, once holes are computed: none stands behind a foreign row."""
        stale = (span.start for number, span in enumerate(self.spans) if number or not self.exact)
        return next(stale, self.tokens)

    @property
    def donors(self) -> tuple[int, ...]:
        """Numbers of the donors that spans are taken from, ascending."""
        return tuple(sorted({span.donor for span in self.spans}))

    def ranges(self, donor: int) -> tuple[tuple[int, int], ...]:
        """First token of each span in a donor, and the one behind its last; in the donor's order."""
        return tuple(sorted((span.at, span.at + span.tokens) for span in self.spans if span.donor == donor))

    def without(self, lost: Iterable[tuple[int, int, int]]) -> EditScript:
        """The script where tokens of donors are lost, which become holes.

        Args:
            lost: Number of the donor, its first token that is lost, and the one behind the last.
        """
        spans = list(self.spans)
        for donor, first, stop in lost:
            spans = [part for span in spans for part in _cut(span, donor, first, stop)]
        return EditScript(self.tokens, _longest(spans))

    def check(self, donors: Sequence[Sequence[int]], token_ids: Sequence[int]) -> None:
        """Compare all that is reused, token by token.

        Args:
            donors: Token ids of each.
            token_ids: Of the prompt.

        Raises:
            ArgumentError: A span is of other tokens, or the script of another prompt.
        """
        whole, texts = np.asarray(token_ids, np.int64), [np.asarray(ids, np.int64) for ids in donors]
        if len(whole) != self.tokens or max(self.donors, default=-1) >= len(texts):
            msg = f"this edit script is of {self.tokens} tokens and the donors {self.donors}, not of this prompt"
            raise ArgumentError(msg)
        for span in self.spans:
            theirs = texts[span.donor][span.at : span.at + span.tokens]
            if not np.array_equal(theirs, whole[span.start : span.stop]):
                raise ArgumentError(f"the tokens of {span} are not those of the prompt")


def align(donors: Sequence[Sequence[int]], token_ids: Sequence[int], least: int = LEAST_SPAN) -> EditScript:
    """Find what a prompt shares with donors.

    Against each donor that is the longest common subsequence (rapidfuzz), less its runs of fewer than ``least`` tokens.
    Of several donors the longest runs count, wherever they do not overlap longer ones.

    Args:
        donors: Token ids of each; the first ones are preferred where runs are as long.
        token_ids: Of the prompt.
        least: Tokens of the shortest span.

    Returns:
        The script. A donor that is too long to be compared with the prompt has no spans.

    Raises:
        ArgumentError: The prompt is empty or too long.
    """
    found = [common_spans(ids, token_ids, number, least) for number, ids in enumerate(donors)]
    return combine_spans(found, len(token_ids), least)


def common_spans(donor: Sequence[int], token_ids: Sequence[int], number: int, least: int = LEAST_SPAN) -> list[Span]:
    """Find what a prompt shares with one donor.

    Args:
        donor: Its token ids.
        token_ids: Of the prompt.
        number: Of the donor.
        least: Tokens of the shortest span.

    Returns:
        Runs of the longest common subsequence, in order; of texts that are too long for it, the ends that they share.
    """
    return [run for run in _common(list(donor), list(token_ids), number) if run.tokens >= least]


def combine_spans(found: Sequence[Sequence[Span]], tokens: int, least: int = LEAST_SPAN) -> EditScript:
    """Make a script of what a prompt shares with donors: the longest spans first, none over another.

    Args:
        found: From ``common_spans``, of each donor.
        tokens: Length of the prompt.
        least: Tokens of the shortest span.

    Returns:
        The script.

    Raises:
        ArgumentError: The prompt is empty or too long.
    """
    runs = [run for runs in found for run in runs]
    if len(found) > 1:
        runs = _longest_first(runs, tokens, least)
    return EditScript(tokens, _longest(runs))


def _longest(spans: Sequence[Span]) -> tuple[Span, ...]:
    """As many as a script may have, in order."""
    return tuple(sorted(sorted(spans, key=lambda span: -span.tokens)[:MAX_SPANS]))


def _common(donor: list[int], whole: list[int], number: int) -> Iterator[Span]:
    """Runs of the longest common subsequence."""
    ahead = _agreeing(donor, whole)
    rest = len(donor) - ahead, len(whole) - ahead
    behind = _agreeing(donor[::-1][: min(rest)], whole[::-1][: min(rest)])
    if (rest[0] - behind) * (rest[1] - behind) > _MAX_PAIRS:
        pairs = [Span(0, 0, ahead, number), Span(len(whole) - behind, len(donor) - behind, behind, number)]
        yield from (each for each in pairs if each.tokens)
        return
    last: Span | None = None
    for code in LCSseq.opcodes(donor, whole):
        if code.tag != "equal":
            continue
        run = Span(code.dest_start, code.src_start, code.dest_end - code.dest_start, number)
        if last and (last.stop, last.at + last.tokens) == (run.start, run.at):
            last = last._replace(tokens=last.tokens + run.tokens)
            continue
        if last:
            yield last
        last = run
    if last:
        yield last


def _agreeing(one: list[int], other: list[int]) -> int:
    most = min(len(one), len(other))
    differ = np.asarray(one[:most], np.int64) != np.asarray(other[:most], np.int64)
    return int(differ.argmax()) if differ.any() else most


def _longest_first(runs: Sequence[Span], tokens: int, least: int) -> list[Span]:
    """Runs that do not overlap, long ones first; what a longer one leaves of a shorter one may still count."""
    is_free, taken = np.ones(tokens, bool), list[Span]()
    for run in sorted(runs, key=lambda run: (-run.tokens, run.donor, run.start)):
        free = np.flatnonzero(np.diff(is_free[run.start : run.stop], prepend=False, append=False))
        for first, stop in zip(free[::2].tolist(), free[1::2].tolist(), strict=True):
            if stop - first >= least:
                taken.append(Span(run.start + first, run.at + first, stop - first, run.donor))
                is_free[run.start + first : run.start + stop] = False
    return taken


def _cut(span: Span, donor: int, first: int, stop: int) -> Iterator[Span]:
    """What is left of a span where some tokens of a donor are lost."""
    end = span.at + span.tokens
    if span.donor != donor or stop <= span.at or end <= first:
        yield span
        return
    if span.at < first:
        yield span._replace(tokens=first - span.at)
    if stop < end:
        yield Span(span.start + stop - span.at, stop, end - stop, donor)
