"""Finds stored texts much like a prompt, and plans whether editing their rows pays.

Search is by similarity, reuse by equal tokens, and the choice by cost: a donor has to save a quarter of the time that
the prompt takes without it. Blocks, so that loads run it in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TYPE_CHECKING

from kvwire.codec import CHUNK_TOKENS
from kvwire.controller import kl_floor
from kvwire.errors import CorruptError, FormatVersionError, NotFoundError
from kvwire.reuse import EditScript, Span, combine_spans, common_spans
from kvwire.store import Donor
from kvwire.store.prefix.index import opening_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.controller import CostModel, Goal
    from kvwire.engines.base import Engine
    from kvwire.runtime.corpus import Corpus
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
_DAMAGED = (CorruptError, FormatVersionError, NotFoundError)


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
    """

    costs: ReuseCosts
    repair: EditRepair
    goal: Goal
    last: int


class SimilarPrompts:
    """Finds donors in one corpus, and plans. Any number of threads may use it."""

    def __init__(self, corpus: Corpus, engine: Engine, writer: str = "", max_kl: float | None = None) -> None:
        """Open the index; nothing is read yet. writer: see ``DonorIndex``. max_kl: see ``LoadSettings``."""
        self._corpus, self._index = corpus, corpus.donors(writer)
        self.opening, self.window, self.max_kl = engine.opening_tokens, engine.window, max_kl

    def search(
        self, token_ids: Sequence[int], hit: PrefixHit | None, terms: EditTerms, misses: list[str], *,
        named: Sequence[str] = (), is_forced: bool = False, tells_all: bool = False,
    ) -> Search:  # fmt: skip
        """Find donors of a prompt and plan.

        Args:
            token_ids: The prompt, without its opening.
            hit: The document that begins as the prompt does.
            terms: What planning goes by.
            misses: What is wrong is added.
            named: Donors by name; empty: they are searched.
            is_forced: Use the best donors, whether they pay or not.
            tells_all: Plan also where no header has to be read to know that nothing pays.

        Returns:
            What was found.

        Raises:
            StorageError: The store fails.
            NotFoundError: A donor that was named is not there.
        """
        plans = _Plans(self, tuple(token_ids[: len(token_ids) - terms.last]), terms)
        if hit is not None and hit.info.context_level is None:
            plans.begin(Donor(hit.document, hit.token_ids[hit.opening :]), hit)
        rival_s = plans.rival_s(hit)
        donors = [self._named(name) for name in named] if named else self._index.find(token_ids, misses.append)
        for donor in donors:
            plans.consider(donor)
        why, least_s = "", plans.least_s()
        if not (is_forced or tells_all) and least_s > (1 - LEAST_GAIN) * rival_s:
            why = f"all donors together take at least {least_s:.3g} s, and {rival_s:.3g} s without donors"
        best = None if why else plans.best(self._check)
        if best is not None:
            best = replace(best, rival_s=rival_s)
            if not is_forced and best.seconds > (1 - LEAST_GAIN) * rival_s:
                why = f"takes {best.seconds:.3g} s, and {rival_s:.3g} s without donors"
        return Search(None if why else best, tuple(plans.told(best, why)), rival_s, best)

    def _named(self, name: str) -> Donor:
        entry = self._corpus.find(name)
        if entry.is_text:
            raise NotFoundError(f"{name!r} is kept as text, and has no rows to give; encode it first")
        return Donor(entry, self._corpus.text(entry))

    def _check(self, donor: Donor) -> BlobInfo | str:
        """A donor's header, or why it gives no rows."""
        try:
            info = self._index.check(donor)
        except _DAMAGED as error:
            return str(error)
        return info if opening_of(info) == self.opening else "it was encoded without the BOS that prompts begin with"


class _Plans:
    """Plans for one prompt, of more and more donors."""

    def __init__(self, prompts: SimilarPrompts, text: tuple[int, ...], terms: EditTerms) -> None:
        self._prompts, self._text, self._last = prompts, text, terms.last
        self._costs, self._repair, self._goal = terms.costs, terms.repair, terms.goal
        self._known: list[tuple[Donor, list[Span]]] = []
        self._infos: dict[int, BlobInfo] = {}
        self._refused: dict[int, str] = {}
        self._begins = False

    def begin(self, donor: Donor, hit: PrefixHit) -> None:
        """The prompt begins with this one. Of what follows in it no more is used unless it is found as a donor."""
        tokens = min(hit.tokens - hit.opening, len(self._text))
        if tokens > 0:
            self._known.append((donor, [Span(0, 0, tokens)]))
            self._infos[0], self._begins = hit.info, True

    def consider(self, donor: Donor) -> None:
        """Compare a donor with the prompt."""
        digests = [known.document.token_digest for known, _ in self._known]
        if donor.document.token_digest not in digests:
            self._known.append((donor, common_spans(donor.token_ids, self._text, len(self._known))))
        elif self._begins and donor.document.token_digest == digests[0]:
            self._known[0] = donor, common_spans(donor.token_ids, self._text, 0)

    def rival_s(self, hit: PrefixHit | None) -> float:
        """Seconds without donors: what the prompt begins with is loaded, the rest computed."""
        total = len(self._text) + self._last
        text_s = self._costs.text_s(total, 0)
        if hit is None:
            return text_s
        size = self._bytes(hit.info, ((0, min(hit.tokens - hit.opening, total - 1)),))
        return min(text_s, self._costs.begun_s(hit, total, size))

    def least_s(self) -> float:
        """Seconds of a plan with all donors whose bytes take no time: no header needs to be read for it."""
        script, known = combine_spans([spans for _, spans in self._known], len(self._text)), self._costs
        total = script.tokens + self._last
        return known.rows_s(script.computed, total) + known.text_s(self._last, script.tokens)

    def best(self, check: Callable[[Donor], BlobInfo | str]) -> EditPlan | None:
        """The soonest plan; donors are taken in one by one, those first that are soonest by themselves."""
        begun = [0] if self._begins else []
        taken, best = begun, self._plan(begun) if begun else None
        order = sorted(range(self._begins, len(self._known)), key=lambda at: -_reused(self._known[at][1]))
        alone = {at: self._with(begun, at, check) for at in order}
        for at in sorted(order, key=lambda at: plan.seconds if (plan := alone[at][0]) else inf):
            plan, why = alone[at]
            if plan is not None and taken != begun:
                plan, why = self._with(taken, at, check)
            if plan is None or (best is not None and plan.seconds >= best.seconds):
                self._refused[at] = why or _NO_GAIN
            else:
                taken, best = [*taken, at], plan
        return None if best is None or self._is_exact(best.script) else best

    def _is_exact(self, script: EditScript) -> bool:
        """Whether nothing is reused but what the prompt begins with, which needs no edit."""
        return script.reused == (script.exact if self._begins else 0)

    def _with(
        self, taken: Sequence[int], at: int, check: Callable[[Donor], BlobInfo | str]
    ) -> tuple[EditPlan | None, str]:  # fmt: skip
        """The plan with one more donor, or why there is none."""
        donor, spans = self._known[at]
        if _reused(spans) < LEAST_REUSED:
            return None, "it shares no more than a phrase"
        if len(taken) >= _MOST_DONORS:
            return None, "there are better ones"
        info = check(donor)
        if isinstance(info, str):
            return None, info
        self._infos[at] = info
        plan = self._plan([*taken, at])
        return plan, "" if plan else "together with others it is longer than the model's window"

    def _plan(self, chosen: Sequence[int]) -> EditPlan | None:
        """Of some donors, those that give no span left out."""
        script = combine_spans([self._known[at][1] for at in chosen], len(self._text))
        used = [at for at in chosen if at in script.donors]
        if sum(len(self._known[at][0].token_ids) for at in used) + len(self._prompts.opening) > self._prompts.window:
            return None
        numbers = {at: number for number, at in enumerate(used)}
        script = EditScript(script.tokens, tuple(span._replace(donor=numbers[span.donor]) for span in script.spans))
        infos = tuple(self._infos[at] for at in used)
        size = sum(self._bytes(info, script.ranges(number)) for number, info in enumerate(infos))
        total = script.tokens + self._last
        repaired = repaired_rows(script, self._repair.share)
        seconds = (
            self._costs.load_s(size, script.reused) + self._costs.closing_s(script.tokens)
            + self._costs.rows_s(script.computed, total) + self._costs.rows_s(repaired, total)
            + self._costs.text_s(self._last, script.tokens) * (2 if repaired else 1)
        )  # fmt: skip
        donors = tuple(self._known[at][0] for at in used)
        for info, donor in zip(infos, donors, strict=True):  # a head start is of the donor's whole text
            seconds += info.prefix_layers / len(info.meta.layers) * self._costs.text_s(len(donor.token_ids), 0)
        error = self._repair.error(script.computed / total)
        return EditPlan(script, donors, infos, self._repair.share, self._repair.selector, size, seconds, 0.0, error)

    def _bytes(self, info: BlobInfo, ranges: Sequence[tuple[int, int]]) -> int:
        return least_bytes(info, ranges, self._goal, self._prompts.max_kl)

    def told(self, best: EditPlan | None, why: str) -> list[Considered]:
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
