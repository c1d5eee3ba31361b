"""``kvwire train-links``: train link tokens, wrappers of documents, or anchors in place of them, for a model."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import click

from kvwire.cli.options import DEVICE, DTYPE, JSON, MODEL
from kvwire.cli.say import say
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.reuse import LinkLayout
    from kvwire.training import Mixture, Recipe, Samples, Text, Training

_LAYOUTS = {"links": "links:5/10", "wrappers": "wrappers:8+8", "anchors": "anchors:100/25"}
_RECIPES = {"links": "kvlink", "wrappers": "kv-packet", "anchors": "kvlink"}


class _TrainOptions(TypedDict):
    model: str
    device: str
    dtype: str
    data: tuple[str, ...]
    out: Path
    method: Literal["links", "wrappers", "anchors"]
    layout: str | None
    frozen: bool
    recipe: str | None
    steps: int | None
    batch: int | None
    micro_batch: int | None
    learning_rate: float | None
    warm_up: int | None
    most_tokens: int | None
    passages: int
    passage_tokens: int
    rest_tokens: int
    given_tokens: int
    skip_long: bool
    seed: int
    keep_every: int
    resume: bool
    as_json: bool


@click.command()
@MODEL
@click.option(
    "--data",
    multiple=True,
    required=True,
    metavar="PATH[=WEIGHT]",
    help="A .jsonl file of samples, a text, or a folder of texts; several are mixed by their weights.",
)
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of what is written."
)
@click.option("--method", type=click.Choice(["links", "wrappers", "anchors"]), default="links", show_default=True)
@click.option("--layout", help="Such as links:5/10, kvlink:5, wrappers:8+8, anchors:100/25; by default the method's.")
@click.option("--frozen", is_flag=True, help="Train new embeddings alone; the model stays. Wrappers always do.")
@click.option(
    "--recipe",
    type=click.Choice(["small", "kvlink", "kv-packet"]),
    help="Settings, which the options below change; without it, those of the method's paper.",
)
@click.option("--steps", type=click.IntRange(1))
@click.option("--batch", type=click.IntRange(1), help="Samples of a step.")
@click.option("--micro-batch", type=click.IntRange(1), help="Samples in memory at a time.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True))
@click.option("--warm-up", type=click.IntRange(0), help="Steps over which the rate rises.")
@click.option("--most-tokens", type=click.IntRange(1), help="Longest sample, laid out.")
@click.option("--passages", default=10, show_default=True, type=click.IntRange(1), help="Most documents cut of a text.")
@click.option("--passage-tokens", default=128, show_default=True, type=click.IntRange(1), help="Of each of them.")
@click.option("--rest-tokens", default=128, show_default=True, type=click.IntRange(2), help="Text behind them.")
@click.option("--given-tokens", default=16, show_default=True, type=click.IntRange(1), help="Of it, not learnt.")
@click.option("--skip-long", is_flag=True, help="Leave out samples that do not fit, where else they are errors.")
@click.option("--seed", default=0, show_default=True)
@click.option("--keep-every", default=100, show_default=True, type=click.IntRange(1), help="Steps between kept states.")
@click.option("--resume", is_flag=True, help="Go on where the training in --out was interrupted.")
@DEVICE
@DTYPE
@JSON
def train_links(**options: Unpack[_TrainOptions]) -> None:
    """Train what lets a model read linked documents: link tokens, or what is stored with or in place of documents.

    Samples are lines of {passages, question, answer}, {passages, turns}, {passages, summary}, {messages} or {text}.
    """
    from kvwire.engines.transformers.opening import open_engine
    from kvwire.training import report_of, train, write_report, write_trained
    from kvwire.training.picture import check_drawable

    check_drawable()
    state = _state(options)
    dtype = "float32" if options["dtype"] == "auto" and not _is_frozen(options) else options["dtype"]
    engine = open_engine(options["model"], device=options["device"], dtype=_dtype(dtype, options["device"]))
    what = _training(options)
    mixture, weights = _mixture(engine, what, options)
    with _progress(what.recipe.steps) as tell:
        trained = train(engine, mixture, what, state=state, resume=options["resume"], tell=tell)
    report = report_of(engine, trained, what, weights)
    report["written"] = write_trained(engine, trained, what, options["out"])
    write_report(report, options["out"])
    if options["as_json"]:
        say(json.dumps(report))
        return
    first, last = (sum(part) / len(part) for part in (trained.losses[:20], trained.losses[-20:]))
    say(f"loss {first:.4f} at first, {last:.4f} at last, in nats a token, means over 20 of {len(trained.losses)} steps")
    say(*(f"{kind.replace('_', ' ')}: {path}" for kind, path in report["written"].items()))


def _dtype(name: str, device: str) -> torch.dtype | None:
    import torch

    if name == "auto":
        return torch.float32 if device == "cpu" else None
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _is_frozen(options: _TrainOptions) -> bool:
    return options["frozen"] or options["method"] == "wrappers"


def _state(options: _TrainOptions) -> Path:
    from kvwire.training.output import STATE

    state = options["out"] / STATE
    if options["resume"] and not state.is_file():
        msg = f"{options['out']} holds no interrupted training; leave --resume out"
        raise ArgumentError(msg)
    if state.exists() and not options["resume"]:
        msg = f"{options['out']} holds a training already; go on with --resume, or name another --out"
        raise ArgumentError(msg)
    return state


def _training(options: _TrainOptions) -> Training:
    from kvwire.reuse import read_layout
    from kvwire.training import RECIPES, Training

    method = options["method"]
    layout: LinkLayout = read_layout(options["layout"] or _LAYOUTS[method])
    recipe: Recipe = RECIPES[options["recipe"] or _RECIPES[method]]
    names = ("steps", "batch", "micro_batch", "learning_rate", "warm_up", "most_tokens")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in names and value is not None}
    recipe = replace(recipe, **given)
    return Training(method, layout, recipe, _is_frozen(options), options["seed"], options["keep_every"])


def _mixture(engine: TransformersEngine, what: Training, options: _TrainOptions) -> tuple[Mixture, dict[str, float]]:
    from kvwire.training import Mixture, TextCut, read_source

    most = min(what.recipe.most_tokens, engine.window)
    documents = min(options["passages"], what.layout.most_documents or options["passages"])
    counts = (0 if what.method == "links" else 1, documents)  # wrappers and anchors learn from documents alone
    cut = TextCut(counts, options["passage_tokens"], options["rest_tokens"], options["given_tokens"])
    parts: dict[str, Samples | Text] = {}
    weights: dict[str, float] = {}
    for given in options["data"]:
        name, weight = _weighted(given)
        if name in parts:
            msg = f"{name} is named twice; give it one weight"
            raise ArgumentError(msg)
        source = read_source(Path(name).expanduser(), engine.tokenize, cut)
        parts[name] = source.fitting(what.layout, most, engine.vocabulary_size, skip_long=options["skip_long"])
        weights[name] = weight
    return Mixture(parts, weights, options["seed"]), weights


def _weighted(given: str) -> tuple[str, float]:
    name, equals, weight = given.rpartition("=")
    if not equals:
        return given, 1.0
    try:
        return name, float(weight)
    except ValueError:
        return given, 1.0


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on stderr, where that is a terminal, with the last loss."""
    from tqdm import tqdm

    with tqdm(total=steps, unit="step", disable=None, desc="training", file=sys.stderr) as bar:

        def tell(step: int, loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            bar.update(step - bar.n)

        yield tell
