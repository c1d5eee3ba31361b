"""``kvwire train-links``: train link tokens, wrappers of documents, or anchors in place of them, for a model."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import open_engine
from kvwire.cli.options import command, flag, option
from kvwire.cli.say import say
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.reuse import LinkLayout
    from kvwire.training import Mixture, Recipe, Samples, Text, Training

_LAYOUTS = {"links": "links:5/10", "wrappers": "wrappers:8+8", "anchors": "anchors:100/25"}
_RECIPES = {"links": "kvlink", "wrappers": "kv-packet", "anchors": "kvlink"}


@dataclass(frozen=True)
class _TrainOptions:
    """What ``kvwire train-links`` is given."""

    model: str = opt.MODEL
    data: tuple[str, ...] = option(
        "A .jsonl file of samples, a text, or a folder of texts; several are mixed by their weights.",
        required=True, metavar="PATH[=WEIGHT]",
    )  # fmt: skip
    out: Path = option("Output folder.", required=True, type=click.Path(file_okay=False, path_type=Path))
    method: Literal["links", "wrappers", "anchors"] = option(
        type=click.Choice(["links", "wrappers", "anchors"]), default="links"
    )
    layout: str | None = option("Such as links:5/10, kvlink:5, wrappers:8+8, anchors:100/25; by default the method's.")
    frozen: bool = flag("Train new embeddings alone; the model stays. Wrappers always do.")
    recipe: str | None = option(
        "Settings, which the options below change; without it, those of the method's paper.",
        type=click.Choice(["small", "kvlink", "kv-packet"]),
    )
    steps: int | None = option(type=click.IntRange(1))
    batch: int | None = option("Samples per step.", type=click.IntRange(1))
    micro_batch: int | None = option("Samples in memory at once.", type=click.IntRange(1))
    learning_rate: float | None = option(type=opt.ABOVE_0)
    warm_up: int | None = option("Steps over which the rate rises.", type=click.IntRange(0))
    most_tokens: int | None = option("Longest sample, in tokens.", type=click.IntRange(1))
    passages: int = option("Most documents cut from a text.", default=10, type=click.IntRange(1))
    passage_tokens: int = option("Tokens of each of these documents.", default=128, type=click.IntRange(1))
    rest_tokens: int = option("Tokens of text after them.", default=128, type=click.IntRange(2))
    given_tokens: int = option("First tokens of that text, which are not learnt.", default=16, type=click.IntRange(1))
    skip_long: bool = flag("Skip samples that do not fit, instead of failing.")
    seed: int = option(default=0)
    keep_every: int = option("Steps between saved states.", default=100, type=click.IntRange(1))
    resume: bool = flag("Resume the interrupted training in --out.")
    device: str = opt.DEVICE
    dtype: str = opt.DTYPE
    as_json: bool = opt.JSON


@command(_TrainOptions)
def train_links(options: _TrainOptions) -> None:
    """Train what lets a model read linked documents: link tokens, or what is stored with or in place of documents.

    Samples are lines of {passages, question, answer}, {passages, turns}, {passages, summary}, {messages} or {text}.
    """
    from kvwire.training import report_of, train, write_report, write_trained
    from kvwire.training.output import check_drawable

    check_drawable()
    state = _state(options)
    dtype = "float32" if options.dtype == "auto" and not _is_frozen(options) else options.dtype
    engine = open_engine(options.model, options.device, dtype)
    what = _training(options)
    mixture, weights = _mixture(engine, what, options)
    with _progress(what.recipe.steps) as tell:
        trained = train(engine, mixture, what, state=state, resume=options.resume, tell=tell)
    report = report_of(engine, trained, what, weights)
    report["written"] = write_trained(engine, trained, what, options.out)
    write_report(report, options.out)
    if options.as_json:
        say(json.dumps(report))
        return
    first, last = (sum(part) / len(part) for part in (trained.losses[:20], trained.losses[-20:]))
    say(f"loss {first:.4f} at first, {last:.4f} at last, in nats a token, means over 20 of {len(trained.losses)} steps")
    say(*(f"{kind.replace('_', ' ')}: {path}" for kind, path in report["written"].items()))


def _is_frozen(options: _TrainOptions) -> bool:
    return options.frozen or options.method == "wrappers"


def _state(options: _TrainOptions) -> Path:
    from kvwire.training.output import STATE

    state = options.out / STATE
    if options.resume and not state.is_file():
        raise ArgumentError(f"{options.out} holds no interrupted training; leave --resume out")
    if state.exists() and not options.resume:
        raise ArgumentError(f"{options.out} holds a training already; go on with --resume, or name another --out")
    return state


def _training(options: _TrainOptions) -> Training:
    from kvwire.reuse import read_layout
    from kvwire.training import RECIPES, Training

    method = options.method
    layout: LinkLayout = read_layout(options.layout or _LAYOUTS[method])
    recipe: Recipe = RECIPES[options.recipe or _RECIPES[method]]
    names = ("steps", "batch", "micro_batch", "learning_rate", "warm_up", "most_tokens")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    recipe = replace(recipe, **given)
    return Training(method, layout, recipe, _is_frozen(options), options.seed, options.keep_every)


def _mixture(engine: TransformersEngine, what: Training, options: _TrainOptions) -> tuple[Mixture, dict[str, float]]:
    from kvwire.training import Mixture, TextCut, read_source

    most = min(what.recipe.most_tokens, engine.window)
    documents = min(options.passages, what.layout.most_documents or options.passages)
    counts = (0 if what.method == "links" else 1, documents)  # wrappers and anchors learn from documents alone
    cut = TextCut(counts, options.passage_tokens, options.rest_tokens, options.given_tokens)
    parts: dict[str, Samples | Text] = {}
    weights: dict[str, float] = {}
    for given in options.data:
        name, weight = _weighted(given)
        if name in parts:
            raise ArgumentError(f"{name} is named twice; give it one weight")
        source = read_source(Path(name).expanduser(), engine.tokenize, cut)
        parts[name] = source.fitting(what.layout, most, engine.vocabulary_size, skip_long=options.skip_long)
        weights[name] = weight
    return Mixture(parts, weights, options.seed), weights


def _weighted(given: str) -> tuple[str, float]:
    name, _, weight = given.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(weight)
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
