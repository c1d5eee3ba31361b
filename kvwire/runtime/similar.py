"""Plans whether editing the rows of stored texts much like a prompt pays.

Reuse is by equal tokens, the choice by cost: a donor has to save a quarter of the time that the prompt takes without
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TYPE_CHECKING

from kvwire.codec import CHUNK_TOKENS
from kvwire.controller import kl_floor
from kvwire.reuse import EditScript, Span, combine_spans, common_spans
from kvwire.store import Donor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.controller import CostModel, Goal
    from kvwire.runtime.reports import EditRepair
    from kvwire.store import PrefixHit
    from kvwire.types import BlobInfo

LEAST_GAIN = 0.25
"""Share of the time without donors that they have to save: what plans are wrong by, and what edits cost in quality."""
LEAST_SAVED = 0.1
"""Share of the time of computing a prompt that its stored beginning has to save: a pass behind one attends at the cost
of no mask left out, which plans do not know."""
LEAST_REUSED = 16
"""Tokens that a donor gives at least: fewer are a phrase."""
SEARCH_ROUNDS, LOAD_ROUNDS = 3, 2
"""Requests one after the other of a search (features, texts, headers), and until the first byte of a load's rows."""
_MOST_DONORS = 4
_NO_GAIN = "with it, the prompt takes no less"


@dataclass(frozen=True)
class ReuseCosts:
    """What a prompt takes, by what is known of link and engine.

    Attributes:
        costs: Of the engine; decoding is of a chunk of many.
        bandwidth: Of the link, in bytes a second.
        ttfb_s: Seconds to the first byte.
    """

    costs: CostModel
    bandwidth: float
    ttfb_s: float

    def load_s(self, size: int, tokens: int) -> float:
        """Seconds until so many bytes are fetched, and the tokens in them decoded beside that."""
        if not tokens:
            return 0.0
        decode_s = self.costs.decode.apart(-(-tokens // CHUNK_TOKENS), tokens, size)
        return LOAD_ROUNDS * self.ttfb_s + max(size / self.bandwidth, decode_s)

    def text_s(self, tokens: int, before: int) -> float:
        """Seconds of a pass over tokens behind others."""
        return self.costs.prefill.seconds(tokens, before)

    def rows_s(self, rows: int, tokens: int) -> float:
        """Seconds of a pass over rows inside a prompt."""
        return replace(self.costs, repair_rows=rows, repair_looks=False).repair_s(tokens)

    def closing_s(self, tokens: int) -> float:
        """Seconds of putting rows in their places and handing the prompt over."""
        return self.costs.link_s_per_token * tokens

    def begun_s(self, hit: PrefixHit, total: int, size: int) -> float:
        """Seconds of a prompt of which so many bytes are loaded, and the rest is computed."""
        tokens = min(hit.tokens - hit.opening, total - 1)
        return self.load_s(size, tokens) + self.text_s(total - tokens, tokens)


@dataclass(frozen=True)
class Considered:
    """A donor that was looked at.

    Attributes:
        document: Its name.
        tokens: That it shares with the prompt.
        spans: In how many runs.
        refused: Why it is not used; empty where it is.
    """

    document: str
    tokens: int
    spans: int
    refused: str = ""


@dataclass(frozen=True, eq=False)
class EditPlan:
    """How a prompt is made of donors.

    Attributes:
        script: Of the prompt without its opening and without what is asked last.
        donors: By their numbers in the script.
        infos: What their headers say.
        share: Of the prompt's rows that are computed anew, behind the first hole.
        selector: What chooses these.
        size: Bytes to fetch, at the least levels.
        seconds: Until the first token, search left out.
        rival_s: The same without donors.
        error: KL divergence that such edits had when the model was checked; None where it was not.
    """

    script: EditScript
    donors: tuple[Donor, ...]
    infos: tuple[BlobInfo, ...]
    share: float
    selector: str
    size: int
    seconds: float
    rival_s: float
    error: float | None = None

    @property
    def repaired(self) -> int:
        """Rows that are computed anew."""
        return repaired_rows(self.script, self.share)


def least_bytes(info: BlobInfo, ranges: Sequence[tuple[int, int]], goal: Goal, max_kl: float | None) -> int:
    """Bytes of the chunks that hold some tokens, at the least level that may be used."""
    level = goal.floor if goal.floor or max_kl is None else kl_floor(info, max_kl)
    level = min(level if goal.ceiling is None else min(level, goal.ceiling), len(info.levels) - 1)
    chunks = {chunk for start, stop in ranges for chunk in info.chunks_of(start, stop)}
    return sum(info.chunk_bytes(chunk, level) for chunk in chunks)


def beginning_pays(costs: ReuseCosts, hit: PrefixHit, total: int, goal: Goal, max_kl: float | None) -> bool:
    """Whether a prompt of so many tokens, opening left out, is sooner there with its stored beginning than without."""
    size = least_bytes(hit.info, ((0, min(hit.tokens - hit.opening, total - 1)),), goal, max_kl)
    return costs.begun_s(hit, total, size) <= (1 - LEAST_SAVED) * costs.text_s(total, 0)


def search_can_pay(costs: ReuseCosts, total: int, last: int, share: float, token_bytes: float = 0.0) -> bool:
    """Whether the best donor there can be, which has all tokens but the last, would pay after a search.

    share: of rows that are computed anew. token_bytes: the least to fetch for a token.
    """
    before = max(0, total - last)
    best_s = (
        SEARCH_ROUNDS * costs.ttfb_s + costs.load_s(int(before * token_bytes), before) + costs.closing_s(before)
        + costs.rows_s(ceil(share * before), total) + costs.text_s(total - before, before)
    )  # fmt: skip
    return best_s <= (1 - LEAST_GAIN) * costs.text_s(total, 0)


def repaired_rows(script: EditScript, share: float) -> int:
    """Rows that a share of an edited prompt is: at most those behind its first hole."""
    return min(ceil(share * script.tokens), script.tokens - script.front)


@dataclass(frozen=True, eq=False)
class Search:
    """What was found for a prompt.

    Attributes:
        plan: What to do; None: nothing pays.
        considered: Donors that were looked at.
        rival_s: Seconds until the first token without donors.
        best: The best plan, whether it pays or not.
    """

    plan: EditPlan | None
    considered: tuple[Considered, ...]
    rival_s: float
    best: EditPlan | None = None


@dataclass(frozen=True)
class EditTerms:
    """What planning goes by.

    Attributes:
        costs: What things take.
        repair: What is done about stale rows.
        goal: What is asked of the load.
        last: How many of the prompt's last tokens are computed in any case.
        room: Most tokens of all donors together.
        max_kl: Greatest expected KL divergence of fetched levels; None: any.
    """

    costs: ReuseCosts
    repair: EditRepair
    goal: Goal
    last: int
    room: int
    max_kl: float | None = None


class EditPlanner:
    """Plans for one prompt, of more and more donors.

    Attributes:
        rival_s: Seconds without donors: what the prompt begins with is loaded, the rest computed.
    """

    def __init__(
        self, text: tuple[int, ...], terms: EditTerms, hit: PrefixHit | None,
        check: Callable[[Donor], BlobInfo | str],
    ) -> None:  # fmt: skip
        """Take the prompt without its opening and its last tokens.

        hit: the document that begins as the prompt does. check: reads a donor's header, or tells why it gives no rows.
        """
        self._text, self._terms, self._costs, self._check = text, terms, terms.costs, check
        self._known: list[tuple[Donor, list[Span]]] = []
        self._infos: dict[int, BlobInfo] = {}
        self._refused: dict[int, str] = {}
        self._begins = False  # whether the first donor is the document that the prompt begins with
        self._total = len(text) + terms.last
        self.rival_s = self._costs.text_s(self._total, 0)
        if hit is not None:
            loaded = min(hit.tokens - hit.opening, self._total - 1)
            begun_s = self._costs.begun_s(hit, self._total, self._bytes(hit.info, ((0, loaded),)))
            self.rival_s = min(self.rival_s, begun_s)
            tokens = min(loaded, len(text))
            if hit.info.context_level is None and tokens > 0:
                # Of what follows in it, no more is used unless it is found as a donor.
                self._known.append((Donor(hit.document, hit.token_ids[hit.opening :]), [Span(0, 0, tokens)]))
                self._infos[0], self._begins = hit.info, True

    def consider(self, donor: Donor) -> None:
        """Compare a donor with the prompt."""
        digests = [known.document.token_digest for known, _ in self._known]
        if donor.document.token_digest not in digests:
            self._known.append((donor, common_spans(donor.token_ids, self._text, len(self._known))))
        elif self._begins and donor.document.token_digest == digests[0]:
            self._known[0] = donor, common_spans(donor.token_ids, self._text, 0)

    def search(self, *, is_forced: bool, tells_all: bool) -> Search:
        """Choose among the donors, and tell of each.

        is_forced: use the best, whether they pay or not. tells_all: plan also where no header has to be read to know
        that nothing pays.
        """
        why, least_s, rival_s = "", self.least_s(), self.rival_s
        if not (is_forced or tells_all) and least_s > (1 - LEAST_GAIN) * rival_s:
            why = f"all donors together take at least {least_s:.3g} s, and {rival_s:.3g} s without donors"
        best = None if why else self.best()
        if best is not None and not is_forced and best.seconds > (1 - LEAST_GAIN) * rival_s:
            why = f"takes {best.seconds:.3g} s, and {rival_s:.3g} s without donors"
        return Search(None if why else best, tuple(self._told(best, why)), rival_s, best)

    def least_s(self) -> float:
        """Seconds of a plan with all donors whose bytes take no time: no header needs to be read for it."""
        script = combine_spans([spans for _, spans in self._known], len(self._text))
        last_s = self._costs.text_s(self._terms.last, script.tokens)
        return self._costs.rows_s(script.computed, self._total) + last_s

    def best(self) -> EditPlan | None:
        """The soonest plan; donors are taken in one by one, those first that are soonest by themselves."""
        begun = [0] if self._begins else []
        taken, best = begun, self._plan(begun) if begun else None
        order = sorted(range(self._begins, len(self._known)), key=lambda at: -_reused(self._known[at][1]))
        alone = {at: self._with(begun, at) for at in order}
        for at in sorted(order, key=lambda at: plan.seconds if (plan := alone[at][0]) else inf):
            plan, why = alone[at]
            if plan is not None and taken != begun:
                plan, why = self._with(taken, at)
            if plan is None or (best is not None and plan.seconds >= best.seconds):
                self._refused[at] = why or _NO_GAIN
            else:
                taken, best = [*taken, at], plan
        return None if best is None or self._is_exact(best.script) else best

    def _is_exact(self, script: EditScript) -> bool:
        """Whether nothing is reused but what the prompt begins with, which needs no edit."""
        return script.reused == (script.exact if self._begins else 0)

    def _with(self, taken: Sequence[int], at: int) -> tuple[EditPlan | None, str]:
        """The plan with one more donor, or why there is none."""
        donor, spans = self._known[at]
        if _reused(spans) < LEAST_REUSED:
            return None, "it shares no more than a phrase"
        if len(taken) >= _MOST_DONORS:
            return None, "there are better ones"
        info = self._check(donor)
        if isinstance(info, str):
            return None, info
        self._infos[at] = info
        plan = self._plan([*taken, at])
        return plan, "" if plan else "together with others it is longer than the model's window"

    def _plan(self, chosen: Sequence[int]) -> EditPlan | None:
        """Of some donors, those that give no span left out."""
        script = combine_spans([self._known[at][1] for at in chosen], len(self._text))
        used = [at for at in chosen if at in script.donors]
        donors, infos = tuple(self._known[at][0] for at in used), tuple(self._infos[at] for at in used)
        if sum(len(donor.token_ids) for donor in donors) > self._terms.room:
            return None
        numbers = {at: number for number, at in enumerate(used)}
        script = EditScript(script.tokens, tuple(span._replace(donor=numbers[span.donor]) for span in script.spans))
        size = sum(self._bytes(info, script.ranges(number)) for number, info in enumerate(infos))
        costs, total, last, repair = self._costs, self._total, self._terms.last, self._terms.repair
        repaired = repaired_rows(script, repair.share)
        seconds = (
            costs.load_s(size, script.reused) + costs.closing_s(script.tokens)
            + costs.rows_s(script.computed, total) + costs.rows_s(repaired, total)
            + costs.text_s(last, script.tokens) * (2 if repaired else 1)
        )  # fmt: skip
        for info, donor in zip(infos, donors, strict=True):  # a head start is of the donor's whole text
            seconds += info.prefix_layers / len(info.meta.layers) * costs.text_s(len(donor.token_ids), 0)
        error = repair.error(script.computed / total)
        return EditPlan(script, donors, infos, repair.share, repair.selector, size, seconds, self.rival_s, error)

    def _bytes(self, info: BlobInfo, ranges: Sequence[tuple[int, int]]) -> int:
        return least_bytes(info, ranges, self._terms.goal, self._terms.max_kl)

    def _told(self, best: EditPlan | None, why: str) -> list[Considered]:
        """Every donor, and why it is not used."""
        used = {donor.document.document_id for donor in best.donors} if best else set()
        named = [(donor.document.document_id, spans) for donor, spans in self._known]
        rest = why if why and best is None else _NO_GAIN
        return [
            Considered(name, _reused(spans), len(spans), self._refused.get(at, why if name in used else rest))
            for at, (name, spans) in enumerate(named)
        ]


def _reused(spans: Sequence[Span]) -> int:
    return sum(span.tokens for span in spans)
