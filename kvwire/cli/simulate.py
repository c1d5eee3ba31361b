"""``kvwire simulate``: what loads would take on a link, with a model and a machine, under one policy or another."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from kvwire._user_file import file_errors
from kvwire.cli import options as opt
from kvwire.cli.inputs import read_file_header, read_link, read_machine, read_shape, read_tokens
from kvwire.cli.options import command, flag, option, repair_of
from kvwire.cli.say import say
from kvwire.errors import ArgumentError, MismatchError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvwire.cli.links import NamedLink
    from kvwire.controller import Objective
    from kvwire.controller.simulator import Model, Scenario, Scored, Summary
    from kvwire.controller.simulator.scenario import Variants

_MOST_TOKENS = 1 << 23
_SPREAD_S = 60.0  # loads on a link that repeats begin anywhere in its first so many seconds
_MOST_LOADS = 20_000  # for each policy, so that they fit into memory
_NAMED = 4  # links in the heading of a table
_FIRST_S = 5.0  # leaves time for the earlier load


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What ``kvwire simulate`` is given."""

    models: tuple[str, ...] = option("Model shape, by name.", "--model", "models", default=["llama-3.1-8b"])
    machines: tuple[str, ...] = option(
        "Machine, by name: one for all models, or one for each.", "--machine", "machines", default=["h100"]
    )
    contexts: str | None = option(
        "Lengths of prompts, such as 4k,32k.  [default: 8k]", "--context", "contexts", metavar="TOKENS"
    )
    documents: int | None = option("Documents of a prompt, equally long.  [default: 4]", type=click.IntRange(1, 10_000))
    methods: tuple[str, ...] = option(
        "Codec whose measured sizes are taken: kvwire, kvwire-head-start-1 or -2 (prefix layers), cachegen; several: "
        "the best for each document.",
        "--method", "methods", default=["kvwire"],
    )  # fmt: skip
    blobs: tuple[str, ...] = option("Take real documents instead: .kvw files.", "--blob", "blobs", metavar="FILE")
    links: tuple[str, ...] = option(
        "Steady link: 1gbit, or 1gbit,5ms with a round trip.", "--link", "links", metavar="RATE"
    )
    traces: tuple[str, ...] = option(
        "File of a recorded link: .json, or lines of s and Mbit/s.", "--trace", "traces", metavar="FILE"
    )
    mean: str | None = option("Scale recorded links to this mean.", metavar="RATE")
    stretch: float | None = option("Stretch recorded links in time; below 1: faster.  [default: 1]", type=float)
    made: tuple[str, ...] = option(
        "Made-up link: ar1:1gbit,0.5,0.9 or steps:0=1gbit,0.5=100mbit or bucket:10gbit,1gbit,100MB.", metavar="FORMULA"
    )
    outages: tuple[str, ...] = option(
        "Outage of every link, in seconds.", "--outage", "outages", metavar="START,LENGTH"
    )
    rtt_s: float = option(
        "Round trip, where the link names none.",
        "--rtt", "rtt_s", default=0.002, type=click.FloatRange(0, 60), metavar="SECONDS",
    )  # fmt: skip
    deadline: float | None = option("Seconds until the first token.", type=opt.ABOVE_0, metavar="SECONDS")
    objective: Objective | None = opt.OBJECTIVE
    max_kl: float | None = opt.MAX_KL
    floor: int | None = opt.FLOOR
    repair: str = option(
        "Rows computed anew so that documents see each other; see kvwire ask.",
        default="none", metavar="none|auto|all|SHARE",
    )  # fmt: skip
    policies: tuple[str, ...] = option(
        "Who decides: adaptive (kvwire's own), cachegen, cachegen-timed, cachegen-artefact, level-0 and so on, text, "
        "raw (plain bfloat16), cacheblend. [default: all]",
        "--policy", "policies",
    )  # fmt: skip
    loads: int = option("Loads, one after the other.", default=1, type=click.IntRange(1, 10_000))
    together: int = option("Concurrent loads that share link and machine.", default=1, type=click.IntRange(1, 1000))
    every_s: float = option(
        "Seconds between concurrent loads.",
        "--every", "every_s", default=0.1, type=click.FloatRange(0, 3600), metavar="SECONDS",
    )  # fmt: skip
    trouble: str = option(
        "Chances of fetches: fail, stall (for stall_s), corrupt; noise: sigma of compute times.",
        default="", metavar="NAME=VALUE,...",
    )  # fmt: skip
    patience_s: float = option(
        "Seconds after which a load counts as failed.",
        "--patience", "patience_s", default=600.0, metavar="SECONDS", type=click.FloatRange(0, 86400, min_open=True),
    )  # fmt: skip
    cold: bool = flag("Begin with priors, without estimates of earlier loads.")
    prior: str = option(
        "Priors are wrong by factors, bandwidth=2,prefill=0.5; implies --cold.", default="", metavar="NAME=FACTOR,..."
    )
    seed: int = option(default=0, type=click.IntRange(0, 2**31))
    out: Path | None = option("Folder for JSON and pictures.", type=click.Path(file_okay=False, path_type=Path))
    as_json: bool = opt.JSON


@dataclass(frozen=True)
class _Case:
    """One scenario with what it is called. group: model, machine and prompt, over which figures are taken."""

    group: tuple[str, str, str]
    link: str
    number: int
    scenario: Scenario


@dataclass(frozen=True)
class _Result:
    case: _Case
    policy: str
    scored: tuple[Scored, ...]


@command(_Asked)
def simulate(asked: _Asked) -> None:
    """Simulate loads: the real controller on a modelled link and machine. docs/simulator.md says what is modelled.

    kvwire simulate --link 1gbit --context 32k --documents 8 --deadline 0.5 --policy adaptive --policy text
    """
    from tqdm import tqdm

    if asked.out:
        _check_pictures()
    cases = list(tqdm(_cases(asked), unit="load", disable=None, desc="drawing", file=sys.stderr, delay=1.0))
    results = list(_played(asked, cases))
    report = _report(asked, results)
    if asked.out:
        _write(asked.out, report, results)
    if asked.as_json:
        say(json.dumps(report))
    else:
        _print(asked, results)


# What is asked.


def _cases(asked: _Asked) -> Iterator[_Case]:
    from kvwire.cli.links import number_pairs
    from kvwire.controller import Goal
    from kvwire.controller.repair import unmeasured
    from kvwire.controller.simulator import Scenario, Trouble

    if len(asked.machines) not in {1, len(asked.models)}:
        msg = f"{len(asked.machines)} machines for {len(asked.models)} models; name one, or one for each model"
        raise ArgumentError(msg)
    objective = asked.objective or ("earliest" if asked.deadline is None else "quality")
    goal = Goal(objective=objective, deadline_s=asked.deadline, floor=asked.floor or 0)
    prior, links = number_pairs(asked.prior, ("bandwidth", "prefill"), "--prior"), _links(asked)
    trouble = Trouble(**_troubles(asked.trouble))
    prompts = 1 if asked.blobs else len((asked.contexts or "").split(","))
    count = len(asked.models) * prompts * len(links) * asked.loads * asked.together
    if count > _MOST_LOADS:
        msg = f"these are {count} loads for each policy, of at most {_MOST_LOADS}: lower --loads or --together"
        raise ArgumentError(msg)
    repair = unmeasured(repair_of(asked.repair))
    machines = asked.machines * (len(asked.models) if len(asked.machines) == 1 else 1)
    for model_name, machine_name in zip(asked.models, machines, strict=True):
        model, machine = read_shape(model_name), read_machine(machine_name)
        for prompt, documents in _prompts(asked, model):
            for number, link in enumerate(links):
                for load in range(asked.loads):
                    scenario = Scenario(
                        model=model, machine=machine, documents=documents(load), rate=link.rate, goal=goal,
                        rtt_s=asked.rtt_s if link.rtt_s is None else link.rtt_s,
                        start_s=_start_s(link, (asked.seed, number, load)),
                        asked=tuple(each * asked.every_s for each in range(asked.together)), trouble=trouble,
                        warm=not (asked.cold or prior), bandwidth_error=prior.get("bandwidth", 1.0),
                        prefill_error=prior.get("prefill", 1.0), leaves_s=asked.patience_s, seed=asked.seed + load,
                        repair=repair,
                    )  # fmt: skip
                    yield _Case((model_name, machine_name, prompt), link.name, load, scenario)


def _start_s(link: NamedLink, seed: tuple[int, ...]) -> float:
    if link.start_s is not None:
        return link.start_s
    spread = min(link.rate.period_s or 0.0, _SPREAD_S)
    return _FIRST_S + float(np.random.default_rng(seed).uniform(0.0, spread)) if spread else _FIRST_S


def _prompts(asked: _Asked, model: Model) -> list[tuple[str, Callable[[int], tuple[Variants, ...]]]]:
    """What prompts are called, and their documents for each load."""
    if asked.blobs:
        if asked.contexts or asked.documents:
            raise ArgumentError("--blob brings documents of its own; leave out --context and --documents")
        read = tuple((_blob(path, model, _kl_bound(asked)),) for path in asked.blobs)
        return [(f"{len(read)} blobs", lambda _: read)]
    count = asked.documents or 4
    prompts: list[tuple[str, Callable[[int], tuple[Variants, ...]]]] = []
    for text in (asked.contexts or "8k").split(","):
        tokens = read_tokens(text, _MOST_TOKENS)
        lengths = [tokens // count + (each < tokens % count) for each in range(count)]
        if not lengths[-1]:
            raise ArgumentError(f"{tokens} tokens do not make {count} documents")
        made = partial(_drawn, model, lengths, asked)
        prompts.append((f"{text.strip()} in {count}", made))
    return prompts


def _drawn(model: Model, lengths: Sequence[int], asked: _Asked, load: int) -> tuple[Variants, ...]:
    from kvwire.controller.simulator import variants_for

    return variants_for(model, lengths, asked.methods, asked.seed + load, _kl_bound(asked))


def _kl_bound(asked: _Asked) -> float | None:
    """A floor that was asked for stands in place of one by KL."""
    return None if asked.floor is not None else asked.max_kl


def _blob(path: str, model: Model, max_kl: float | None) -> Any:  # noqa: ANN401 - DocumentPlanInput, imported late
    from kvwire.controller import DocumentPlanInput

    info = read_file_header(Path(path))
    if info.meta.elements_per_token != model.cache_elements:
        raise MismatchError(
            f"{path} holds {info.meta.elements_per_token} elements for each token, {model.name} has "
            f"{model.cache_elements}: name the --model that it is of"
        )
    return DocumentPlanInput.from_blob(info, prefix_share=info.prefix_layers / len(info.meta.layers), max_kl=max_kl)


def _links(asked: _Asked) -> list[NamedLink]:
    from kvwire.cli.links import made_link, recorded_link, steady_link, with_outage

    if not asked.traces and (asked.mean is not None or asked.stretch is not None):
        raise ArgumentError("--mean and --stretch change recorded links: name one with --trace, or leave them out")
    stretch = 1.0 if asked.stretch is None else asked.stretch
    if not 0 < stretch < inf:
        raise ArgumentError(f"--stretch takes a number above 0, got {stretch}")
    mean = read_link(asked.mean).bandwidth_bytes_s if asked.mean else None
    links = [steady_link(text) for text in asked.links]
    links += [recorded_link(path, mean, stretch) for path in asked.traces]
    links += [made_link(text, asked.seed) for text in asked.made]
    links = links or [steady_link("1gbit")]
    for outage in asked.outages:
        links = [with_outage(link, outage) for link in links]
    return links


def _troubles(text: str) -> dict[str, float]:
    from kvwire.cli.links import number_pairs

    found = number_pairs(text, ("fail", "stall", "stall_s", "corrupt", "noise"), "--trouble")
    for name in ("fail", "stall", "corrupt"):
        if found.get(name, 0.0) > 1:
            msg = f"--trouble: fail, stall and corrupt are chances from 0 to 1, got {name}={found[name]:g}"
            raise ArgumentError(msg)
    return found


# What becomes of it.


def _played(asked: _Asked, cases: Sequence[_Case]) -> Iterator[_Result]:
    from tqdm import tqdm

    from kvwire.controller.simulator import Scored, policy_named, policy_names
    from kvwire.controller.simulator import simulate as play

    levels = max(max(each.finest for each in variants) + 1 for case in cases for variants in case.scenario.documents)
    names = asked.policies or policy_names(levels)
    for name in names:
        policy_named(name, cases[0].scenario.rate)  # a wrong name is told before anything is played
    with tqdm(total=len(cases) * len(names), unit="load", disable=None, desc="simulating", file=sys.stderr) as bar:
        for case in cases:
            for name in names:
                outcomes = play(case.scenario, policy_named(name, case.scenario.rate))
                kept = [replace(each, spans=(), decisions=()) if case.number else each for each in outcomes]
                pairs = zip(kept, case.scenario.bounds, strict=True)
                yield _Result(case, name, tuple(Scored(case.scenario.goal, *pair) for pair in pairs))
                bar.update()


def _groups(results: Sequence[_Result]) -> dict[tuple[str, str, str], dict[str, Summary]]:
    from kvwire.controller.simulator import Summary

    groups: dict[tuple[str, str, str], dict[str, list[Scored]]] = {}
    for result in results:
        groups.setdefault(result.case.group, {}).setdefault(result.policy, []).extend(result.scored)
    return {group: {name: Summary.of(each) for name, each in found.items()} for group, found in groups.items()}


def _report(asked: _Asked, results: Sequence[_Result]) -> dict[str, Any]:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(asked).items()}
    summaries = [
        {"model": group[0], "machine": group[1], "prompt": group[2], "sizes": _sizes(asked, group[0]), "policy": name}
        | asdict(figures)
        for group, found in _groups(results).items()
        for name, figures in found.items()
    ]
    loads = [
        {"model": result.case.group[0], "prompt": result.case.group[2], "link": result.case.link,
         "number": result.case.number, "policy": result.policy} | _load(scored)
        for result in results
        for scored in result.scored
    ]  # fmt: skip
    return {"settings": settings, "summaries": summaries, "loads": loads}


def _sizes(asked: _Asked, model: str) -> str:
    """Where the documents' sizes come from, in words."""
    from kvwire.controller.simulator import source_in_words

    return "sizes of the blobs that were named" if asked.blobs else source_in_words(read_shape(model), asked.methods)


def _load(scored: Scored) -> dict[str, Any]:
    outcome, bound = scored.outcome, scored.bound
    names = ("ttft_s", "in_time", "failed", "error", "received", "wasted", "recomputed", "levels", "reason",
             "repair", "link_error")  # fmt: skip
    best = {"ttft_s": bound.ttft_s if np.isfinite(bound.ttft_s) else None, "in_time": bound.in_time}
    return {"asked_s": outcome.asked_at, **{name: getattr(outcome, name) for name in names}, "regret": scored.regret,
            "bound": best | {"error": bound.error, "bytes": bound.bytes}}  # fmt: skip


_HEAD = ("policy", "TTFT p10", "p50", "p90", "p99", "missed", "avoidable", "regret p50", "p90", "dB", "MB", "wasted",
         "recomputed")  # fmt: skip


def _print(asked: _Asked, results: Sequence[_Result]) -> None:
    links = sorted({result.case.link for result in results})
    for (model, machine, prompt), found in _groups(results).items():
        first = next(iter(found.values()))
        named = ", ".join(links[:_NAMED]) + (" and others" if len(links) > _NAMED else "")
        loads = "1 load" if first.loads == 1 else f"{first.loads} loads"
        say("", f"{model} on {machine}, {prompt}: {loads} over {named}")
        say(_sizes(asked, model))
        if asked.deadline is not None:
            say(f"deadline {asked.deadline:g} s, which could not be kept in {first.missed_by_bound} of them")
        rows = [_HEAD, *(_row(name, figures) for name, figures in found.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            say("  ".join([row[0].ljust(widths[0]), *cells]))
    say(
        "",
        "TTFT: seconds to the first token; regret: against the best that was possible; dB: quality of loads in time; "
        "MB: received for each load",
    )


def _row(name: str, figures: Summary) -> tuple[str, ...]:
    times = [f"{seconds:.3f}" for seconds in figures.ttft_s] if figures.ttft_s else ["-"] * 4
    regret = [f"{share:.1%}" for share in figures.regret] if figures.regret else ["-", "-"]
    quality = "-" if figures.quality_db is None else f"{figures.quality_db:.1f}"
    wasted = f"{figures.wasted / max(figures.received, 1):.1%}"
    size = f"{figures.received / figures.loads / 1e6:.1f}"
    misses = [str(figures.missed), str(figures.avoidable)]
    return (name, *times, *misses, *regret, quality, size, wasted, f"{figures.recomputed:.0%}")


def _check_pictures() -> None:
    try:
        import kvwire.whatif.pictures  # noqa: F401 - only whether it can be
    except ImportError as error:
        msg = "pictures need matplotlib: pip install 'kvwire[demo]', or leave out --out and use --json"
        raise NotFoundError(msg) from error


def _write(out: Path, report: dict[str, Any], results: Sequence[_Result]) -> None:
    from kvwire.whatif.pictures import draw_cdf, draw_load

    with file_errors(f"{out} cannot be written", "choose another --out"):
        out.mkdir(parents=True, exist_ok=True)
        (out / "simulation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        first = results[0].case
        panels: dict[str, dict[str, list[float]]] = {}
        for result in results:
            times = [scored.outcome.ttft_s for scored in result.scored if not scored.outcome.failed]
            panels.setdefault(", ".join(result.case.group), {}).setdefault(result.policy, []).extend(times)
        draw_cdf(panels, first.scenario.goal.deadline_s, out / "ttft.png")
        title = ", ".join((*first.group, first.link, results[0].policy))
        draw_load(results[0].scored[0].outcome, title, out / "load.png")
    say(f"written: simulation.json, ttft.png and load.png in {out}", err=True)
