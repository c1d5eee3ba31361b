"""``kvwire ask``: a question over documents of a store."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from kvwire.cli.engines import open_engine
from kvwire.cli.failures import leave
from kvwire.cli.options import (
    BACKEND,
    DEVICE,
    DTYPE,
    FLOOR,
    JSON,
    LINKS,
    MAX_KL,
    MODEL,
    REPAIR,
    SOFT_TOKENS,
    USES,
    StoreOptions,
    repair_of,
    store_options,
    use_file,
)
from kvwire.cli.printing import print_answer
from kvwire.cli.progress import stages
from kvwire.errors import ArgumentError, DeadlineError, NotFoundError

if TYPE_CHECKING:
    from kvwire.codec import Backend
    from kvwire.controller import Objective, OnLate
    from kvwire.engines.base import Engine
    from kvwire.reuse import SchemaPrompt
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.settings import LoadSettings
    from kvwire.types import Chat


_SILENCE_SHARE, _LEAST_SILENCE_S = 0.25, 1.0


class _AskOptions(TypedDict):
    docs: tuple[str, ...]
    more_docs: tuple[str, ...]
    question: str
    deadline: float | None
    link: str | None
    exact: bool
    max_kl: float | None
    floor: int | None
    ceiling: int | None
    on_late: OnLate
    repair: str
    look: bool
    repair_floor: float | None
    selector: str
    link_bound: float | None
    shift: bool
    keep_repairs: bool
    kept_size: str | None
    objective: Objective | None
    tokens: int
    texts: str | None
    variants: tuple[str, ...]
    schema: str | None
    arguments: tuple[str, ...]
    links: str | None
    soft_tokens: Path | None
    system: str | None
    chat: bool
    before: str
    uses: str | None
    model: str
    device: str
    dtype: str
    backend: Backend
    verbose: bool
    as_json: bool


@click.command()
@click.option("--docs", "docs", multiple=True, required=True, help="Ids of documents, in the prompt's order.")
@click.argument("more_docs", nargs=-1)
@click.option("--question", required=True, help="What the model continues after the documents.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to the first token.",
)
@click.option("--link", help="Emulate a link: 50mbit or 50mbit,20ms.")
@click.option(
    "--exact",
    is_flag=True,
    help="Caches bit for bit as the model computes them: lossless levels (encode --lossless), or the texts computed.",
)
@MAX_KL
@FLOOR
@click.option(
    "--ceiling",
    type=click.IntRange(0, 7),
    help="Finest level that is worth waiting for; any without it.",
)
@click.option(
    "--on-late",
    default="serve",
    show_default=True,
    type=click.Choice(["serve", "refuse"]),
    help="What to do where the first token cannot be in time: serve it as soon as possible, or refuse at once.",
)
@REPAIR
@click.option(
    "--repair-floor",
    type=click.FloatRange(0, 1),
    help="Share that auto repairs at least; by default what check-model found that the model needs.",
)
@click.option(
    "--selector",
    default="auto",
    show_default=True,
    help="What chooses these rows: attention, blend, cacheblend, lmcache, first, random; auto: as check-model found.",
)
@click.option(
    "--link-bound",
    type=click.FloatRange(0),
    help="Of what documents tell, the share that links may lose by what check-model found: beyond it nothing is "
    "answered. Without it, a warning.",
)
@click.option(
    "--look/--no-look",
    default=True,
    show_default=True,
    help="Before a deadline: fetch coarse levels first where that pays, see which of them the question attends to, and "
    "finer levels of those.",
)
@click.option(
    "--shift/--no-shift",
    default=True,
    show_default=True,
    help="Add to linked documents what they lack on average, where check-model found that it helps.",
)
@click.option(
    "--keep-repairs",
    is_flag=True,
    help="Keep rows that were computed anew, for the same documents in the same order, and use what is kept.",
)
@click.option("--kept-size", help="Of all rows that are kept of the model and tenant, such as 2GB; 1GiB without it.")
@click.option(
    "--objective",
    type=click.Choice(["earliest", "quality", "cheapest"]),
    help="The soonest first token, or the best quality or the fewest bytes within the deadline; by default quality "
    "with a deadline, and earliest without.",
)
@click.option(
    "--tokens", default=32, show_default=True, type=click.IntRange(min=1), help="Length of the answer at most."
)
@click.option("--texts", help="Folder of the documents' texts, for those whose blob is lost.")
@click.option(
    "--variant-tenant",
    "variants",
    multiple=True,
    help="Tenant that has the documents encoded for another head start, to be used where that is sooner; repeatable.",
)
@click.option("--schema", metavar="FILE", help="JSON file of modules with places of their own, which --docs names.")
@click.option(
    "--argument",
    "arguments",
    multiple=True,
    metavar="MODULE.PARAMETER=TEXT",
    help="Text that takes the place of a slot of the schema; repeatable.",
)
@LINKS
@SOFT_TOKENS
@click.option("--system", help="Text before the documents, computed in every prompt; with --chat the system turn.")
@click.option(
    "--chat",
    is_flag=True,
    help="Put the model's chat template around documents and question, which are the user's turn; the answer is the "
    "assistant's.",
)
@click.option("--before", default="", help="With --chat, the user's words before the documents.")
@USES
@MODEL
@store_options
@DEVICE
@DTYPE
@BACKEND
@click.option("-v", "--verbose", is_flag=True, help="Tell what is measured before the answer, also off a terminal.")
@JSON
def ask(place: StoreOptions, **options: Unpack[_AskOptions]) -> None:
    """Answer a question over documents of a store: --docs A B C --question "..."."""
    names, deadline = [*options["docs"], *options["more_docs"]], options["deadline"]
    with stages(is_told=options["verbose"] or sys.stderr.isatty()):
        names, answer = _answer(names, place, options)
    error = None
    if deadline is not None and answer.timing.ttft_s > deadline:
        error = DeadlineError(
            f"the first token came after {answer.timing.ttft_s:.3f} s, the deadline was {deadline:g} s"
        )
    print_answer(names, answer, as_json=options["as_json"], error=error)
    if error:
        leave(error)


def _settings(options: _AskOptions) -> LoadSettings:
    from kvwire.runtime.settings import LoadSettings

    settings = _hasty(LoadSettings(), options["deadline"])
    settings = replace(
        settings,
        exact=options["exact"],
        max_kl=options["max_kl"],
        quality_floor=options["floor"],
        quality_ceiling=options["ceiling"],
        backend=options["backend"],
        on_late=options["on_late"],
        repair=repair_of(options["repair"]),
        repair_floor=options["repair_floor"],
        selector=options["selector"],
        link_bound=options["link_bound"],
        look=options["look"],
        shift=options["shift"],
        keep_repairs=options["keep_repairs"],
    )
    if not options["kept_size"]:
        return settings
    from kvwire.store import parse_size

    return replace(settings, kept_bytes=parse_size(options["kept_size"]))


def _hasty(settings: LoadSettings, deadline_s: float | None) -> LoadSettings:
    """Before a deadline, a loader does not begin by waiting long for a store that is silent."""
    if deadline_s is None:
        return settings
    return replace(settings, open_s=min(settings.open_s, max(_SILENCE_SHARE * deadline_s, _LEAST_SILENCE_S)))


def _laid_out(settings: LoadSettings, engine: Engine, options: _AskOptions) -> LoadSettings:
    """With the layout and the system text that options name."""
    asked = "" if options["chat"] else options["system"]
    if not (options["links"] or options["soft_tokens"] or asked):
        return settings
    from kvwire.cli.layouts import use_layout

    if options["schema"]:
        msg = "modules of a schema stand where it has them: leave out --links, --soft-tokens and --system"
        raise ArgumentError(msg)
    system = tuple(engine.tokenize(asked, place="first", trust="frame")) if asked else ()
    return replace(settings, layout=use_layout(engine, options["links"], options["soft_tokens"]), system=system)


def _chat(options: _AskOptions) -> Chat | None:
    """What options say of the chat; None: there is none."""
    if not options["chat"]:
        if options["before"]:
            msg = "--before is of a chat: give --chat, too"
            raise ArgumentError(msg)
        return None
    from kvwire.types import Chat

    if options["schema"]:
        msg = "modules of a schema stand where it has them: leave out --chat"
        raise ArgumentError(msg)
    return Chat(system=options["system"], before=options["before"])


def _answer(names: list[str], place: StoreOptions, options: _AskOptions) -> tuple[list[str], Answer]:
    """The answer, and names of what stands in the prompt, in its order."""
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.loader import Loader
    from kvwire.runtime.text_files import read_texts, token_ids
    from kvwire.transport import parse_link

    chat = _chat(options)
    engine = open_engine(options["model"], options["device"], options["dtype"])
    settings = _laid_out(_settings(options), engine, options)
    texts = read_texts([options["texts"]]) if options["texts"] else {}
    if options["arguments"] and not options["schema"]:
        msg = "--argument fills a slot of a schema: give --schema"
        raise ArgumentError(msg)
    with closing(place.open()) as opened:
        corpus = Corpus(engine, opened, **place.whose(), uses=use_file(options["uses"]))
        others = [Corpus(engine, opened, **(place.whose() | {"tenant": tenant})) for tenant in options["variants"]]
        emulated = parse_link(options["link"]) if options["link"] else None
        schema = _schema_prompt(corpus, engine, names, options) if options["schema"] else None
        wanted = {name: text for name, text in texts.items() if name in (schema.documents if schema else names)}
        known = {name: token_ids(engine.tokenize, engine.window, text) for name, text in wanted.items()}
        with Loader(engine, corpus, variants=others, link=emulated, settings=settings) as loader:
            question: str | list[int] = options["question"]
            if chat is None:
                question = engine.tokenize(options["question"], place="last", trust="frame")
            asking = partial(loader.ask, names, chat=chat) if schema is None else partial(loader.ask_schema, schema)
            answer = asking(
                question,
                deadline_s=options["deadline"],
                objective=options["objective"],
                tokens=options["tokens"],
                texts=known,
            )
            return (list(schema.names) if schema else names), answer


def _schema_prompt(corpus: Corpus, engine: Engine, names: list[str], options: _AskOptions) -> SchemaPrompt:
    """What ``--docs`` and ``--argument`` take of the schema."""
    from kvwire.reuse import read_schema
    from kvwire.runtime.schemas import sized

    path = Path(options["schema"] or "")
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror}); --schema names a JSON file"
        raise NotFoundError(msg) from error
    arguments = {}
    for given in options["arguments"]:
        name, is_given, text = given.partition("=")
        if not is_given:
            msg = f"--argument is MODULE.PARAMETER=TEXT, got {given!r}"
            raise ArgumentError(msg)
        arguments[name] = engine.tokenize(text) if text else []
    detokenize = engine.detokenize if engine.has_tokenizer else None
    return sized(read_schema(data), corpus, detokenize).prompt(names, arguments)
