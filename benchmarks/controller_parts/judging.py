"""Loads on links that vary, put together: figures of groups, and whether the aims are reached in every kind of link."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measure import table

from kvwire.controller.simulator import Scored, Summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from controller_parts.links import DrawnLink

JUDGED = ("adaptive", "level-0", "cachegen", "cachegen-timed", "cachegen-artefact", "text")
LATE = ", text late"
_TOKENS, _DEADLINES_S = 32768, (0.5, 1.0)
_REGRET, _WASTED, _SHARE = 0.05, 0.01, 1 / 3


@dataclass(frozen=True)
class Run:
    """One load; everything that figures are taken from. text_in_time: text alone brings it in time."""

    model: str
    length: int
    deadline_s: float
    policy: str
    link: DrawnLink
    scored: Scored
    text_in_time: bool

    @property
    def is_judged(self) -> bool:
        """Whether the aims are of it."""
        return self.length == _TOKENS and self.deadline_s in _DEADLINES_S


def _keys(run: Run) -> Iterator[str]:
    each = f"{run.length} tokens, {run.deadline_s:g} s"
    for key in ("all", run.model, f"{run.length} tokens", f"{run.deadline_s:g} s", each):
        yield key
        if not run.text_in_time:
            yield f"{key}{LATE}"
    yield f"{run.model} {run.length} {run.deadline_s:g} s"


def summaries(runs: Iterable[Run]) -> dict[str, dict[str, Summary]]:
    """Figures of each policy, for all, each model, length, deadline and combination; and where text alone is late."""
    groups: dict[str, dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for key in _keys(run):
            groups[key][run.policy].append(run.scored)
    return {key: {name: Summary.of(scored) for name, scored in each.items()} for key, each in groups.items()}


def told_apart(runs: Sequence[Run]) -> list[list[str]]:
    """Loads, and those of them that text alone brings in time: for each length and deadline, and each kind of link."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for run in runs:
        if run.policy == "text":
            length = f"{run.length} tokens, {run.deadline_s:g} s"
            for key in (length, *([f"judged, {run.link.scale}, {run.link.kind}"] if run.is_judged else ())):
                counts[key][0] += 1
                counts[key][1] += run.text_in_time
    return [[key, str(loads), str(vacuous)] for key, (loads, vacuous) in sorted(counts.items())]


def judged(runs: Sequence[Run]) -> dict[str, Any]:
    """Print avoidable misses, regret and waste by kind of link, and say which aims are reached."""
    groups: dict[tuple[str, str], dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.is_judged and run.policy in JUDGED:
            for key in ((run.link.scale, run.link.kind), (run.link.scale, "all"), ("both", "all")):
                groups[key][run.policy].append(run.scored)
    if not groups:
        return {}
    found = {key: {name: Summary.of(each[name]) for name in JUDGED if name in each} for key, each in groups.items()}
    names = list(found["both", "all"])
    deadlines = " and ".join(f"{each:g}" for each in _DEADLINES_S)
    print(f"\n{_TOKENS} tokens, {deadlines} s: avoidable misses / regret p90 / waste")
    rows = [[*key, str(next(iter(each.values())).loads), *(_cell(each[name]) for name in names)]
            for key, each in sorted(found.items())]  # fmt: skip
    print(table(("scale", "kind", "loads", *names), rows))
    by_kind = [
        {"scale": scale, "kind": kind, "policy": name, "loads": each.loads, "missed": each.missed,
         "avoidable": each.avoidable, "regret_p90": each.regret[1] if each.regret else None,
         "wasted": _wasted(each)}
        for (scale, kind), by in sorted(found.items()) for name, each in by.items()
    ]  # fmt: skip
    aims = _aims(found)
    print("\n".join(f"{name}: {'reached' if holds else 'MISSED'}" for name, holds in aims.items()))
    return {"by_kind": by_kind, "aims": aims}


def _aims(found: dict[tuple[str, str], dict[str, Summary]]) -> dict[str, bool]:
    whole = found["both", "all"]
    if not {"adaptive", "level-0", "cachegen"} <= whole.keys():
        return {}
    ours = whole["adaptive"]
    later = [f"{kind} ({scale})" for (scale, kind), each in sorted(found.items())
             if each["adaptive"].avoidable > each["level-0"].avoidable]  # fmt: skip
    where = f", but for {', '.join(later)}" if later else ""
    return {
        f"avoidable misses at most level 0's in every kind{where}": not later,
        "at most a third of CacheGen's": ours.avoidable <= _SHARE * whole["cachegen"].avoidable,
        "regret p90 at most 5 %": ours.regret is not None and ours.regret[1] <= _REGRET,
        "waste at most 1 %": _wasted(ours) <= _WASTED,
    }


def _wasted(figures: Summary) -> float:
    return figures.wasted / max(figures.received, 1)


def _cell(figures: Summary) -> str:
    regret = f"{figures.regret[1]:.1%}" if figures.regret else "-"
    return f"{figures.avoidable} / {regret} / {_wasted(figures):.1%}"
