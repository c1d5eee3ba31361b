"""``kvwire check-model``: what linked documents lose with a model, and what repair gives back."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvwire._json import strict_json
from kvwire.cli.inputs import open_engine
from kvwire.cli.options import DEVICE, DTYPE, JSON, STORE, StoreOptions, argument, command, flag, option
from kvwire.cli.say import error_as_data, leave, say
from kvwire.errors import ArgumentError, KvwireError, PartialError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.engines.base import Engine
    from kvwire.runtime.link_check import CheckPrompt
    from kvwire.runtime.reports import LinkReport

_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class _CheckOptions:
    """What ``kvwire check-model`` is given."""

    model: str = argument(envvar="KVWIRE_MODEL")
    documents: str = option("Folder of .txt or .md files like those that will be linked.", required=True)
    questions: str | None = option(
        "JSON list of {documents, question, answer}; without it, texts are cut into prompts."
    )
    prompts: int = option("Number of prompts to measure.", default=12, type=click.IntRange(min=1))
    bound: float = option(
        "Largest share of the documents' effect on the model that links may lose.",
        default=0.1, type=click.FloatRange(0, 1),
    )  # fmt: skip
    picture: str | None = option("PNG file to draw.")
    seed: int = option("Seed for the choice of prompts.", default=0)
    shift_prompts: int = option(
        "Further prompts to learn the mean shift of linked documents from; 0: learn none.",
        default=48, type=click.IntRange(min=0),
    )  # fmt: skip
    neutral_prefix: int = option(
        "Tokens of neutral text that documents are computed behind, as in kvwire encode.",
        default=0, metavar="N", type=click.IntRange(0),
    )  # fmt: skip
    edits: bool = flag("Measure prompts made of similar ones instead (kvwire ask --reuse).")
    place: StoreOptions = STORE
    device: str = DEVICE
    dtype: str = DTYPE
    as_json: bool = JSON


@command(_CheckOptions)
def check_model(options: _CheckOptions) -> None:
    """Measure what MODEL loses where documents are linked, what repair gives back, and write it into --store."""
    from tqdm import tqdm

    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.link_check import check_links, learn_shift

    engine = open_engine(options.model, options.device, options.dtype)
    texts, failures = _texts(engine, options.documents)
    if options.edits and options.neutral_prefix:
        raise ArgumentError("--edits measures prompts of documents computed alone: give it without --neutral-prefix")
    if options.edits:
        _check_edits(engine, options, texts, failures)
        return
    prompts, learning = _prompts(engine, options, texts)
    opened = options.place.open_lasting() if options.place.store else None
    corpus = Corpus(engine, opened, **options.place.whose()) if opened else None
    profile = corpus.profile() if corpus else None
    with tqdm(total=len(learning), unit="prompt", disable=None, desc="learning the shift") as bar:
        learnt_from = [] if options.neutral_prefix else [prompt.documents for prompt in learning]
        shift = learn_shift(engine, learnt_from, tell=lambda _: (bar.update(), None)[1])
    with tqdm(total=len(prompts), unit="prompt", disable=None, desc="measuring links") as bar:
        report = check_links(
            engine, prompts, profile, bound=options.bound, shift=shift,
            neutral=options.neutral_prefix,
            tell=lambda _: (bar.update(), None)[1],
        )  # fmt: skip
    if opened and corpus:
        with closing(opened):
            if shift and report.shift:
                corpus.set_link_shift(shift)
            corpus.set_link_report(report)
    if options.as_json:
        said = asdict(report) | {"allowed": report.allowed, "within": report.is_within}
        say(json.dumps(said | _failed(failures, len(texts))))
    else:
        _print(report, len(engine.meta.layers))
    if options.picture:
        _draw(report, Path(options.picture))
    _end(failures, len(texts))


def _texts(engine: Engine, folder: str) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Token ids of the texts that can be read, and why others cannot."""
    from kvwire.runtime.text_files import read_texts

    failures: dict[str, str] = {}

    def skip(name: str, error: KvwireError) -> None:
        failures[name] = str(error)
        say(f"kvwire: {name} is left out: {error}", err=True)

    texts = read_texts([folder], skip=skip)
    if not texts:
        raise StorageError(f"none of the {len(failures)} texts in {folder} can be read; see above")
    return {name: list(engine.tokenize(text)) for name, text in texts.items()}, failures


def _partial(failures: Mapping[str, str], read: int) -> PartialError | None:
    failed = len(failures)
    return PartialError(f"{failed} of {read + failed} documents were left out") if failed else None


def _failed(failures: Mapping[str, str], read: int) -> dict[str, object]:
    """What a report in JSON says of texts that were left out; nothing where there are none."""
    error = _partial(failures, read)
    return {"failures": failures} | error_as_data(error) if error else {}


def _end(failures: Mapping[str, str], read: int) -> None:
    """Leave with an error where texts were left out."""
    if error := _partial(failures, read):
        leave(error)


def _check_edits(
    engine: Engine, options: _CheckOptions, texts: Mapping[str, list[int]], failures: Mapping[str, str]
) -> None:
    """Measure edits, and keep what was found."""
    from tqdm import tqdm

    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.edit_check import EDITED, check_edits

    with tqdm(total=options.prompts * len(EDITED), unit="prompt", disable=None, desc="measuring edits") as bar:
        report = check_edits(
            engine, list(texts.values()), options.prompts, seed=options.seed,
            tell=lambda _: (bar.update(), None)[1],
        )  # fmt: skip
    if options.place.store:
        with closing(options.place.open_lasting()) as opened:
            Corpus(engine, opened, **options.place.whose()).set_edit_report(report)
    chosen = report.choose(len(engine.meta.layers))
    if options.as_json:
        said = asdict(report) | {"share": chosen.share, "selector": chosen.selector, "safe": chosen.is_safe}
        say(json.dumps(said | _failed(failures, len(texts))))
        _end(failures, len(texts))
        return
    say(f"{report.prompts} prompts each; KL divergence from a full prefill, in nats, by share of tokens that differ")
    rows = {"donor as it is": report.donor, "holes computed": report.holes}
    rows |= {
        f"{name} {share:.0%}": row
        for name, each in report.repaired.items()
        for share, row in zip(report.shares, each, strict=True)
    }
    say(f"{'':<22}" + "".join(f"{share:>10.0%}" for share in report.edited))
    for name, row in rows.items():
        say(f"{name:<22}" + "".join(f"{kl:>10.5f}" for kl in row))
    how = f"{chosen.share:.0%} of the rows anew by {chosen.selector}" if chosen.share else "holes alone"
    safe = (
        "kvwire ask --prompt uses similar prompts from now on"
        if chosen.is_safe
        else "similar prompts are used only on demand (--reuse auto)"
    )
    within = "within" if chosen.is_safe else "not within"
    say("", f"best: {how}, {within} {report.bound:.0%} of what the donor is wrong by: {safe}")
    _end(failures, len(texts))


def _draw(report: LinkReport, path: Path) -> None:
    try:
        from kvwire.comparison.pictures import draw_links

        draw_links(report, path)
    except ImportError as error:
        raise ArgumentError("a picture needs matplotlib: pip install 'kvwire[demo]'") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror})") from error


def _prompts(
    engine: Engine, options: _CheckOptions, texts: Mapping[str, list[int]]
) -> tuple[list[CheckPrompt], list[CheckPrompt]]:
    """Prompts to measure, and others that a shift is learnt from."""
    from kvwire.runtime.link_check import CheckPrompt, prompts_of, shortened, split_prompts

    window = engine.window - len(engine.opening_tokens)
    if not options.questions:
        known, seed = list(texts.values()), options.seed
        return split_prompts(known, options.prompts, options.shift_prompts, window, seed=seed)
    found, named = [], set[str]()
    for asked in _questions(Path(options.questions)):
        lost = [name for name in asked["documents"] if name not in texts]
        if lost:
            raise ArgumentError(f"{options.questions} names {lost[0]!r}, which is no document in {options.documents}")
        named.update(asked["documents"])
        documents = tuple(tuple(texts[name]) for name in asked["documents"])
        question = tuple(engine.tokenize(asked["question"], place="last", trust="frame"))
        answer = tuple(engine.tokenize(asked["answer"], place="last", trust="frame")) if asked.get("answer") else ()
        found.append(CheckPrompt(documents, question, answer))
    fitting = shortened(found, window)[: options.prompts]
    if not fitting:
        msg = f"no question of {options.questions} fits the model's window of {engine.window} tokens with its texts"
        raise ArgumentError(msg)
    others, learning = [ids for name, ids in texts.items() if name not in named], []
    with suppress(ArgumentError):  # none of them is long enough: no shift is learnt
        learning = prompts_of(others, options.shift_prompts, window, seed=options.seed)
    return [prompt if prompt.rest else _answered(engine, prompt) for prompt in fitting], learning


def _answered(engine: Engine, prompt: CheckPrompt) -> CheckPrompt:
    """With the model's own answer from a full prefill, where none is given."""
    from dataclasses import replace

    from kvwire.runtime.prefill import opened

    (past_cache,) = engine.prefill([opened(engine, [*prompt.text, *prompt.question])])
    start = past_cache.tokens
    past = engine.past_key_values(past_cache.slice(0, start - 1))
    first = int(engine.forward(past, [prompt.question[-1]], start - 1, logits=1)[-1].argmax())
    room = min(_ANSWER_TOKENS, engine.window - start)
    return replace(prompt, rest=tuple(engine.generate(past, first, start, room)))


def _questions(path: Path) -> list[dict[str, Any]]:
    try:
        value = strict_json(path.read_bytes(), str(path))
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror})") from error
    good = isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("question"), str)
        and isinstance(each.get("documents"), list)
        and each["documents"]
        and isinstance(each.get("answer", ""), str)
        for each in value
    )
    if not isinstance(value, list) or not good:
        raise ArgumentError(f"{path} is not a list of {{documents, question, answer}}")
    return value


def _print(report: LinkReport, layers: int) -> None:
    lost = report.linked / report.no_documents if report.no_documents else 0.0
    say(
        f"{report.prompts} prompts; KL divergence from a full prefill, in nats: "
        f"{report.no_documents:.4f} without documents, {report.linked:.5f} +- {report.linked_error:.5f} linked",
        f"links lose {lost:.1%} of what documents tell; {report.bound:.0%} is allowed",
        f"documents were computed behind {report.neutral} neutral tokens"
        if report.neutral
        else "documents were computed alone; where the store's are not, give the --neutral-prefix of kvwire encode",
        "",
        f"{'rows computed anew':<22}" + "".join(f"{share:>10.0%}" for share in report.shares),
    )
    for name, row in report.repaired.items():
        say(f"{name:<22}" + "".join(f"{kl:>10.5f}" for kl in row))
    _print_shift(report)
    if report.levels:
        say("", "levels, over the first prompts alone:")
        say(f"{'level':<22}{'linked':>10}{f'{report.repaired_share:.0%} anew':>10}")
    for name, kl in report.levels.items():
        repaired = report.levels_repaired.get(name)
        say(f"{name:<22}{kl:>10.5f}" + (f"{repaired:>10.5f}" if repaired is not None else ""))
    say("", _verdict(report, layers))


def _print_shift(report: LinkReport) -> None:
    from kvwire.runtime.reports import GAIN_SHARE

    if report.neutral:
        return  # loads add none to such documents
    if not report.shift_gain:
        say("", "no mean shift was learnt: texts like these are too few, or the model takes none")
        return
    gain, low, high = report.shift_gain
    verdict = "loads add it" if report.shift else "it does not surely help, and is not kept"
    say(
        "",
        f"with the mean shift, learnt from {report.shift_prompts} other prompts: {report.shifted:.5f} linked",
        *(f"{name:<22}" + "".join(f"{kl:>10.5f}" for kl in row) for name, row in report.shifted_repaired.items()),
        f"it takes away {gain:.5f} ({low:.5f} to {high:.5f}) at {GAIN_SHARE:.0%} of the rows: {verdict}",
    )


def _verdict(report: LinkReport, layers: int) -> str:
    report = report.with_shift()
    if report.is_within:
        return "documents may be linked as they are"
    selector = report.best_selector(layers)
    share = report.least_share(selector)
    if share is None:
        return "no share that was measured is enough: run prompts like these as text, or --repair all"
    return f"loads repair {share:.0%} of the rows or more, chosen by {selector}: kvwire ask reads this from the store"
