"""``kvwire check-model``: what linked documents lose with a model, and what repair gives back."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import msgspec

from kvwire._json import strict_json
from kvwire._user_file import file_errors
from kvwire.cli import options as opt
from kvwire.cli.inputs import open_engine, read_file
from kvwire.cli.options import StoreOptions, argument, command, flag, option
from kvwire.cli.say import error_as_data, leave, progress, say
from kvwire.errors import ArgumentError, KvwireError, PartialError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvwire.engines.base import Engine
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.link_check import CheckPrompt
    from kvwire.runtime.reports import EditRepair, EditReport, LinkReport

    Texts = Mapping[str, list[int]]
    Checked = tuple[dict[str, Any], Iterator[str], Callable[[], None]]

_ANSWER_TOKENS = 16
_LOOKED_AT = 16  # documents of the store that show what theirs are computed behind


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
    neutral_prefix: int | None = option(
        "Tokens of neutral text that documents are computed behind, as in kvwire encode; by default as in the store.",
        metavar="N", type=click.IntRange(0),
    )  # fmt: skip
    edits: bool = flag("Measure prompts made of similar ones instead (kvwire ask --reuse).")
    place: StoreOptions = opt.STORE
    device: str = opt.DEVICE
    dtype: str = opt.DTYPE
    as_json: bool = opt.JSON


@command(_CheckOptions)
def check_model(options: _CheckOptions) -> None:
    """Measure what MODEL loses where documents are linked, what repair gives back, and write it into --store."""
    from kvwire.runtime.corpus import Corpus

    if options.edits and options.neutral_prefix:
        raise ArgumentError("--edits measures prompts of documents computed alone: give it without --neutral-prefix")
    engine = open_engine(options.model, options.device, options.dtype)
    texts, failures = _texts(engine, options.documents)
    error = None
    if failures:
        error = PartialError(f"{len(failures)} of {len(texts) + len(failures)} documents were left out")
    with ExitStack() as stack:
        corpus = None
        if options.place.store:
            opened = stack.enter_context(closing(options.place.open_lasting()))
            corpus = Corpus(engine, opened, **options.place.whose())
        told, lines, draw = (_check_edits if options.edits else _check_links)(engine, options, texts, corpus)
    if options.as_json:
        say(json.dumps(told | ({"failures": failures} | error_as_data(error) if error else {})))
    else:
        say(*lines)
    draw()  # last: what took long to measure is printed, whatever becomes of a picture
    if error:
        leave(error)


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


def _check_links(engine: Engine, options: _CheckOptions, texts: Texts, corpus: Corpus | None) -> Checked:
    """Measure links, and keep what was found."""
    from kvwire.runtime.link_check import check_links, learn_shift

    neutral = _neutral(options, corpus)
    prompts, learning = _prompts(engine, options, texts)
    with progress("learning the shift", "prompt", len(learning)) as tell:
        learnt_from = [] if neutral else [prompt.documents for prompt in learning]
        shift = learn_shift(engine, learnt_from, tell=lambda _: tell(1))
    with progress("measuring links", "prompt", len(prompts)) as tell:
        profile = corpus.profile() if corpus else None
        report = check_links(
            engine, prompts, profile, bound=options.bound, shift=shift, neutral=neutral, tell=lambda _: tell(1)
        )
    if corpus:
        if shift and report.shift:
            corpus.set_link_shift(shift)
        corpus.set_link_report(report)
    told = asdict(report) | {"allowed": report.allowed, "within": report.is_within}
    lines = _link_lines(report, len(engine.meta.layers), is_known=corpus is not None)
    return told, lines, partial(_draw, report, options.picture)


def _neutral(options: _CheckOptions, corpus: Corpus | None) -> int:
    """Tokens of neutral text that documents are computed behind: those of the store, unless others are asked for."""
    asked, counts = options.neutral_prefix, list[int]()
    if corpus is not None:
        blobs = (one for one in corpus.catalog.documents(corpus.config, lambda *_: None) if not one.is_text)
        for entry in islice(blobs, _LOOKED_AT):
            with suppress(KvwireError):  # others tell
                info = corpus.read_header(entry)
                counts.append(len(info.neutral_prefix) - info.opening)
    there = max(counts, default=0)
    if asked is not None and counts and there != asked:
        trouble = f"documents of the store were computed behind {there} neutral tokens, this report is of {asked}"
        say(f"kvwire: {trouble}: leave out --neutral-prefix", err=True)
    return there if asked is None else asked


def _check_edits(engine: Engine, options: _CheckOptions, texts: Texts, corpus: Corpus | None) -> Checked:
    """Measure edits, and keep what was found."""
    from kvwire.runtime.edit_check import EDITED, check_edits

    with progress("measuring edits", "prompt", options.prompts * len(EDITED)) as tell:
        report = check_edits(engine, list(texts.values()), options.prompts, seed=options.seed, tell=lambda _: tell(1))
    if corpus:
        corpus.set_edit_report(report)
    chosen = report.choose(len(engine.meta.layers))
    told = asdict(report) | {"share": chosen.share, "selector": chosen.selector, "safe": chosen.is_safe}
    return told, _edit_lines(report, chosen), lambda: None


def _draw(report: LinkReport, path: str | None) -> None:
    if not path:
        return
    try:
        from kvwire.comparison.pictures import draw_links
    except ImportError as error:
        raise ArgumentError("a picture needs matplotlib: pip install 'kvwire[demo]'") from error
    with file_errors(f"{path} cannot be written", "choose another --picture"):
        draw_links(report, Path(path))


class _Question(msgspec.Struct):
    """A question of the file, and its answer if that is known."""

    documents: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    question: str
    answer: str = ""


def _questions(path: Path) -> list[_Question]:
    try:
        return msgspec.convert(strict_json(read_file(path, "check --questions"), str(path)), list[_Question])
    except msgspec.ValidationError as error:
        raise ArgumentError(f"{path} is not a list of {{documents, question, answer}} ({error})") from error


def _prompts(engine: Engine, options: _CheckOptions, texts: Texts) -> tuple[list[CheckPrompt], list[CheckPrompt]]:
    """Prompts to measure, and others that a shift is learnt from."""
    from kvwire.runtime.link_check import CheckPrompt, prompts_of, shortened, split_prompts

    window = engine.window - len(engine.opening_tokens)
    if not options.questions:
        return split_prompts(list(texts.values()), options.prompts, options.shift_prompts, window, seed=options.seed)
    found, named = [], set[str]()
    for asked in _questions(Path(options.questions)):
        if lost := [name for name in asked.documents if name not in texts]:
            raise ArgumentError(f"{options.questions} names {lost[0]!r}, which is no document in {options.documents}")
        named.update(asked.documents)
        question, answer = (
            tuple(engine.tokenize(text, place="last", trust="frame")) if text else ()
            for text in (asked.question, asked.answer)
        )
        found.append(CheckPrompt(tuple(tuple(texts[name]) for name in asked.documents), question, answer))
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
    from kvwire.runtime.prefill import opened

    (past_cache,) = engine.prefill([opened(engine, [*prompt.text, *prompt.question])])
    start = past_cache.tokens
    past = engine.past_key_values(past_cache.slice(0, start - 1))
    first = int(engine.forward(past, [prompt.question[-1]], start - 1, logits=1)[-1].argmax())
    room = min(_ANSWER_TOKENS, engine.window - start)
    return replace(prompt, rest=tuple(engine.generate(past, first, start, room)))


def _shares(shares: Sequence[float]) -> str:
    return "".join(f"{share:>10.0%}" for share in shares)


def _rows(rows: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """A line of KL divergences for each name."""
    for name, row in rows.items():
        yield f"{name:<22}" + "".join(f"{kl:>10.5f}" for kl in row)


def _link_lines(report: LinkReport, layers: int, *, is_known: bool) -> Iterator[str]:
    lost = report.linked / report.no_documents if report.no_documents else 0.0
    yield (
        f"{report.prompts} prompts; KL divergence from a full prefill, in nats: "
        f"{report.no_documents:.4f} without documents, {report.linked:.5f} +- {report.linked_error:.5f} linked"
    )
    yield f"links lose {lost:.1%} of what documents tell; {report.bound:.0%} is allowed"
    if report.neutral:
        yield f"documents were computed behind {report.neutral} neutral tokens"
    else:
        advice = "" if is_known else "; where the store's are not, name it, or give --neutral-prefix"
        yield f"documents were computed alone{advice}"
    yield ""
    yield f"{'rows computed anew':<22}{_shares(report.shares)}"
    yield from _rows(report.repaired)
    yield from _shift_lines(report)
    if report.levels:
        yield ""
        yield "levels, over the first prompts alone:"
        yield f"{'level':<22}{'linked':>10}{f'{report.repaired_share:.0%} anew':>10}"
    repaired = report.levels_repaired
    yield from _rows(
        {name: [kl, *([repaired[name]] if name in repaired else [])] for name, kl in report.levels.items()}
    )
    yield ""
    yield _verdict(report, layers)


def _shift_lines(report: LinkReport) -> Iterator[str]:
    from kvwire.runtime.reports import GAIN_SHARE

    if report.neutral:
        return  # loads add none to such documents
    yield ""
    if not report.shift_gain:
        yield "no mean shift was learnt: texts like these are too few, or the model takes none"
        return
    gain, low, high = report.shift_gain
    verdict = "loads add it" if report.shift else "it does not surely help, and is not kept"
    yield f"with the mean shift, learnt from {report.shift_prompts} other prompts: {report.shifted:.5f} linked"
    yield from _rows(report.shifted_repaired)
    yield f"it takes away {gain:.5f} ({low:.5f} to {high:.5f}) at {GAIN_SHARE:.0%} of the rows: {verdict}"


def _edit_lines(report: EditReport, chosen: EditRepair) -> Iterator[str]:
    yield f"{report.prompts} prompts each; KL divergence from a full prefill, in nats, by share of tokens that differ"
    yield f"{'':<22}{_shares(report.edited)}"
    yield from _rows({"donor as it is": report.donor, "holes computed": report.holes})
    for name, rows in report.repaired.items():
        yield from _rows({f"{name} {share:.0%}": row for share, row in zip(report.shares, rows, strict=True)})
    how = f"{chosen.share:.0%} of the rows anew by {chosen.selector}" if chosen.share else "holes alone"
    within, then = "not within", "similar prompts are used only on demand (--reuse auto)"
    if chosen.is_safe:
        within, then = "within", "kvwire ask --prompt uses similar prompts from now on"
    yield ""
    yield f"best: {how}, {within} {report.bound:.0%} of what the donor is wrong by: {then}"


def _verdict(report: LinkReport, layers: int) -> str:
    report = report.with_shift()
    if report.is_within:
        return "documents may be linked as they are"
    selector = report.best_selector(layers)
    share = report.least_share(selector)
    if share is None:
        return "no share that was measured is enough: run prompts like these as text, or --repair all"
    return f"loads repair {share:.0%} of the rows or more, chosen by {selector}: kvwire ask reads this from the store"
