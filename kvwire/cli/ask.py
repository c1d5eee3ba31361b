"""``kvwire ask``: a question over documents of a store."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import open_engine, read_file
from kvwire.cli.options import StoreOptions, argument, command, flag, option, repair_of, use_file
from kvwire.cli.printing import print_answer
from kvwire.cli.say import leave, stages
from kvwire.errors import ArgumentError, DeadlineError, NotFoundError, PartialError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.codec import Backend
    from kvwire.controller import Objective, OnLate
    from kvwire.engines.base import Engine
    from kvwire.reuse import SchemaPrompt
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.loader import Loader
    from kvwire.runtime.prompt_request import ReuseMode
    from kvwire.runtime.settings import LoadSettings
    from kvwire.types import Chat


_SILENCE_SHARE, _LEAST_SILENCE_S = 0.25, 1.0


@dataclass(frozen=True)
class AskOptions:
    """What ``kvwire ask`` is given."""

    docs: tuple[str, ...] = option("Ids of documents, in the prompt's order.")
    prompt: Path | None = option("File with a whole prompt: its stored part is loaded, the rest computed.")
    reuse: ReuseMode | None = option(
        "What a prompt may be made of: a stored beginning (exact), similar prompts too where that is sooner (auto), "
        "these in any case (donors), nothing (none). By default auto where check-model --edits found it safe.",
        type=click.Choice(["auto", "exact", "donors", "none"]),
    )
    donor: tuple[str, ...] = option(
        "Document similar to the prompt; repeatable. By default such documents are searched."
    )
    session: str | None = option("Name of a conversation; the question is its next turn, and each turn is stored.")
    save: bool = flag(
        "Store prompt and answer, for prompts that begin with them, or are similar (--reuse auto). What was made of "
        "donors is computed whole for it, after the answer."
    )
    more_docs: tuple[str, ...] = argument(nargs=-1)
    question: str = option("Text that the model continues, after the documents or the prompt.", default="")
    deadline: float | None = option("Seconds until the first token.", type=opt.ABOVE_0)
    prefetch: tuple[str, ...] = option(
        "Document to prefetch into --cache after the answer; repeatable.", "--soon", "prefetch"
    )
    first: int | None = option(
        "Load only the first N tokens of each document, as if it ended there.", metavar="N", type=click.IntRange(min=1)
    )
    link: str | None = option("Emulate a network link: 50mbit or 50mbit,20ms.")
    exact: bool = flag("Bit-exact caches only: lossless levels (encode --lossless), or recomputed text.")
    max_kl: float | None = opt.MAX_KL
    floor: int | None = opt.FLOOR
    ceiling: int | None = option("Finest level worth waiting for; by default any.", type=click.IntRange(0, 7))
    on_late: OnLate = option(
        "If the first token cannot be in time: serve it as soon as possible, or refuse at once.",
        default="serve", type=click.Choice(["serve", "refuse"]),
    )  # fmt: skip
    repair: str = opt.REPAIR
    repair_floor: float | None = option(
        "Least share that auto repairs; by default what check-model found the model to need.",
        type=click.FloatRange(0, 1),
    )
    selector: str = option(
        "What chooses these rows: attention, blend, product, deviation, cacheblend, lmcache, first, random; "
        "auto: as check-model found.",
        default="auto",
    )
    link_bound: float | None = option(
        "Of what documents tell, the share that links may lose by what check-model found: beyond it nothing is "
        "answered. Without it, a warning.",
        type=click.FloatRange(0),
    )
    look: bool = option(
        "Before a deadline: fetch coarse levels first where that pays, see which of them the question attends to, and "
        "finer levels of those.",
        "--look/--no-look", default=True,
    )  # fmt: skip
    shift: bool = option(
        "Add to linked documents what they lack on average, where check-model found that it helps.",
        "--shift/--no-shift", default=True,
    )  # fmt: skip
    keep_repairs: bool = flag(
        "Keep rows that were computed anew, for the same documents in the same order, and use what is kept."
    )
    kept_size: str | None = option("Limit of all kept rows of the model and tenant, such as 2GB; by default 1GiB.")
    objective: Objective | None = opt.OBJECTIVE
    tokens: int = option("Most tokens of the answer.", default=32, type=click.IntRange(min=1))
    texts: str | None = option("Folder with the documents' texts, for those whose blob is lost.")
    variants: tuple[str, ...] = option(
        "Tenant that has the documents with other prefix layers, to be used where that is sooner; repeatable.",
        "--variant-tenant",
    )
    schema: str | None = option("JSON file of a Prompt Cache schema, whose modules --docs names.", metavar="FILE")
    arguments: tuple[str, ...] = option(
        "Text for a parameter of the schema; repeatable.", "--argument", metavar="MODULE.PARAMETER=TEXT"
    )
    links: str | None = opt.LINKS
    soft_tokens: Path | None = opt.SOFT_TOKENS
    system: str | None = option("Text before the documents, computed in every prompt; with --chat the system turn.")
    chat: bool = flag(
        "Put the model's chat template around documents and question, which are the user's turn; the answer is the "
        "assistant's."
    )
    before: str = opt.CHAT_BEFORE
    uses: str | None = opt.USES
    model: str = opt.MODEL
    place: StoreOptions = opt.STORE
    device: str = opt.DEVICE
    dtype: str = opt.DTYPE
    backend: Backend = opt.BACKEND
    verbose: bool = flag("Print progress before the answer, even if stderr is no terminal.", "-v", "--verbose")
    as_json: bool = opt.JSON


@command(AskOptions)
def ask(options: AskOptions) -> None:
    """Answer a question over documents of a store (--docs A B C), a prompt (--prompt), or a session's next turn."""
    _check_prompt(options)
    names, deadline = [*options.docs, *options.more_docs], options.deadline
    error: DeadlineError | PartialError | None = None
    with ExitStack() as stack:
        with stages(is_told=options.verbose or sys.stderr.isatty()):
            names, answer = _answer(names, options.place, options, stack)
        if deadline is not None and answer.timing.ttft_s > deadline:
            error = DeadlineError(
                f"the first token came after {answer.timing.ttft_s:.3f} s, the deadline was {deadline:g} s"
            )
        if error is None and (options.save or options.session) and not (answer.reused and answer.reused.saved):
            error = PartialError("the answer was not saved, as told among its misses; mend that and ask again")
        print_answer(names, answer, as_json=options.as_json, error=error)
    if error:
        leave(error)


def _settings(options: AskOptions) -> LoadSettings:
    from kvwire.runtime.settings import LoadSettings

    settings = _hasty(LoadSettings(), options.deadline)
    settings = replace(
        settings,
        exact=options.exact,
        max_kl=options.max_kl,
        quality_floor=options.floor,
        quality_ceiling=options.ceiling,
        backend=options.backend,
        on_late=options.on_late,
        repair=repair_of(options.repair),
        repair_floor=options.repair_floor,
        selector=options.selector,
        link_bound=options.link_bound,
        look=options.look,
        shift=options.shift,
        keep_repairs=options.keep_repairs,
        first_tokens=options.first,
    )
    if not options.kept_size:
        return settings
    from kvwire.store import parse_size

    return replace(settings, kept_bytes=parse_size(options.kept_size))


def _hasty(settings: LoadSettings, deadline_s: float | None) -> LoadSettings:
    """Before a deadline, a loader does not begin by waiting long for a store that is silent."""
    if deadline_s is None:
        return settings
    return replace(settings, open_s=min(settings.open_s, max(_SILENCE_SHARE * deadline_s, _LEAST_SILENCE_S)))


def _laid_out(settings: LoadSettings, engine: Engine, options: AskOptions) -> LoadSettings:
    """With the layout and the system text that options name."""
    asked = "" if options.chat else options.system
    if not (options.links or options.soft_tokens or asked):
        return settings
    from kvwire.cli.inputs import use_layout

    if options.schema:
        msg = "modules of a schema stand where it has them: leave out --links, --soft-tokens and --system"
        raise ArgumentError(msg)
    system = tuple(engine.tokenize(asked, place="first", trust="frame")) if asked else ()
    return replace(settings, layout=use_layout(engine, options.links, options.soft_tokens), system=system)


def _chat(options: AskOptions) -> Chat | None:
    """What options say of the chat; None: there is none."""
    if not options.chat:
        if options.before:
            raise ArgumentError("--before is of a chat: give --chat, too")
        return None
    from kvwire.types import Chat

    if options.schema:
        raise ArgumentError("modules of a schema stand where it has them: leave out --chat")
    return Chat(system=options.system, before=options.before)


def _prefetch(corpus: Corpus, options: AskOptions, failed: type[BaseException] | None, *_: object) -> None:
    """Prefetch documents of later questions, once this one is answered."""
    if failed:
        return
    if not corpus.prefetch(options.prefetch, -1 if options.exact else options.ceiling).wait():
        raise StorageError("not all documents of --soon came: the store failed, or they have too many parts; try again")


def _check_saved(loader: Loader, failed: type[BaseException] | None, *_: object) -> None:
    """Leave with an error, once the loader is closed, where a prompt could not be saved after its answer."""
    if loader.unsaved and not failed:
        leave(PartialError("the answer was not saved, as told above; mend that and ask again"))


def _answer(names: list[str], place: StoreOptions, options: AskOptions, stack: ExitStack) -> tuple[list[str], Answer]:
    """The answer, and names of what stands in the prompt, in its order; what the stack has to do comes after it."""
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.loader import Loader
    from kvwire.transport import parse_link

    chat, plain = _chat(options), _settings(options)
    emulated = parse_link(options.link) if options.link else None
    engine = open_engine(options.model, options.device, options.dtype)
    settings = _laid_out(plain, engine, options)
    if options.arguments and not options.schema:
        raise ArgumentError("--argument fills a slot of a schema: give --schema")
    opened = stack.enter_context(closing(place.open()))
    corpus = Corpus(engine, opened, **place.whose(), uses=use_file(options.uses))
    if options.prefetch:
        stack.push(partial(_prefetch, corpus, options))
    others = [Corpus(engine, opened, **(place.whose() | {"tenant": tenant})) for tenant in options.variants]
    schema, known = (
        _schema_prompt(corpus, engine, names, options) if options.schema else (None, _texts(engine, options, names))
    )
    loader = Loader(engine, corpus, variants=others, link=emulated, settings=settings)
    stack.push(partial(_check_saved, loader))
    stack.enter_context(loader)
    stack.callback(sys.stdout.flush)  # closing waits for what is kept in the background
    if not names:
        return _answer_prompt(loader, engine, options, chat)
    question: str | list[int] = options.question
    if chat is None:
        question = engine.tokenize(options.question, place="last", trust="frame")
    asking = partial(loader.ask, names, chat=chat) if schema is None else partial(loader.ask_schema, schema)
    answer = asking(
        question, deadline_s=options.deadline, objective=options.objective, tokens=options.tokens, texts=known
    )
    return (list(schema.names) if schema else names), answer


def _texts(engine: Engine, options: AskOptions, names: Sequence[str]) -> dict[str, list[int]]:
    """Token ids of the documents' texts in the folder of ``--texts``; empty without one."""
    if not options.texts:
        return {}
    from kvwire.runtime.text_files import read_texts, token_ids

    found = read_texts([options.texts], names)
    return {name: token_ids(engine.tokenize, engine.window, text) for name, text in found.items()}


def _schema_prompt(
    corpus: Corpus, engine: Engine, names: list[str], options: AskOptions
) -> tuple[SchemaPrompt, dict[str, list[int]]]:
    """What ``--docs`` and ``--argument`` take of the schema, and the texts of its documents."""
    from kvwire.reuse import read_schema
    from kvwire.runtime.schemas import sized

    data = read_file(Path(options.schema or ""), "--schema names a JSON file")
    arguments = {}
    for given in options.arguments:
        name, is_given, text = given.partition("=")
        if not is_given:
            raise ArgumentError(f"--argument is MODULE.PARAMETER=TEXT, got {given!r}")
        arguments[name] = engine.tokenize(text) if text else []
    detokenize = engine.detokenize if engine.has_tokenizer else None
    schema = read_schema(data)
    needed = [module.document_id for module in schema.modules if module.name in names or not module.tokens]
    texts = _texts(engine, options, needed)
    return sized(schema, corpus, detokenize, texts).prompt(names, arguments), texts


def _check_prompt(options: AskOptions) -> None:
    """Refuse what does not go together, before a model is opened."""
    kinds = {"--docs": bool(options.docs), "--prompt": options.prompt is not None, "--session": bool(options.session)}
    given = [name for name, is_given in kinds.items() if is_given]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise ArgumentError(f"a question is over --docs, a --prompt or a --session: give one of them, got {got}")
    if not options.question and not options.prompt:
        raise ArgumentError("there is no question: give --question")
    if options.prefetch and not options.place.cache:
        raise ArgumentError("--soon fetches documents into the local cache: give --cache, too")
    unused: dict[str, object]
    if options.docs:
        unused = {"--save": options.save}
    else:
        unused = {
            "--schema": options.schema, "--links": options.links, "--soft-tokens": options.soft_tokens,
            "--texts": options.texts, "--first": options.first, "--variant-tenant": options.variants,
            "document ids": options.more_docs,
        }  # fmt: skip
    if not options.prompt:
        unused |= {"--reuse": options.reuse, "--donor": options.donor}
    if options.prompt:
        unused |= {"--chat": options.chat, "--system": options.system}
    if options.session and options.system is not None and not options.chat:
        unused |= {"--system": "without --chat"}
    if wrong := [name for name, value in unused.items() if value]:
        raise ArgumentError(f"{given[0]} goes without {' and '.join(wrong)}: leave that out")


def _answer_prompt(loader: Loader, engine: Engine, options: AskOptions, chat: Chat | None) -> tuple[list[str], Answer]:
    """The answer, and the name of what the prompt begins with."""
    if options.session:
        answer = loader.converse(
            options.session, options.question, chat=chat, deadline_s=options.deadline, objective=options.objective,
            tokens=options.tokens,
        )  # fmt: skip
    else:
        ids = prompt_tokens(engine, options.prompt, options.question)
        answer = loader.ask_prompt(
            ids, deadline_s=options.deadline, objective=options.objective, tokens=options.tokens, save=options.save,
            reuse=options.reuse, donors=options.donor,
        )  # fmt: skip
    name = answer.reused.document if answer.reused else ""
    return [name or "prompt"], answer


def prompt_tokens(engine: Engine, path: Path | None, question: str = "") -> list[int]:
    """Token ids of a prompt in a file, and of what stands behind it."""
    from kvwire.runtime.text_files import decoded_text, read_part

    if path is None or not path.is_file():
        raise NotFoundError(f"{path} is not a file; check --prompt")
    ids = list(engine.tokenize(decoded_text(read_part(str(path)), str(path)), place="first", trust="frame"))
    return ids + (list(engine.tokenize(question, place="last", trust="frame")) if question else [])
