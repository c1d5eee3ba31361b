"""``kvwire salt``: what a request to vLLM must carry to get linked documents or a stored prefix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import model_name, open_tokenizer
from kvwire.cli.options import StoreOptions, argument, command, flag, option
from kvwire.cli.say import say
from kvwire.errors import ArgumentError


@dataclass(frozen=True)
class _SaltOptions:
    """What ``kvwire salt`` is given."""

    docs: tuple[str, ...] = option("Ids of documents of the store, in the prompt's order.")
    more_docs: tuple[str, ...] = argument(nargs=-1)
    computed: tuple[str, ...] = option("Documents behind those, for vLLM to compute; with --question.")
    prefix: bool = flag("Instead of documents: the longest prefix that the store's index knows.")
    save: bool = flag("Have vLLM keep what it computes of the prompt; changes no salt.")
    repair: str | None = option("Lay over them what ask --keep-repairs computed and kept.", type=click.Choice(["kept"]))
    level: int | None = opt.LEVEL
    deadline_s: float | None = option("Seconds to load for.", "--deadline", "deadline_s", type=opt.ABOVE_0)
    objective: str | None = opt.OBJECTIVE
    question: str | None = option("Print the body of a whole request that ends with this; needs --model as a folder.")
    chat: bool = flag("Put the model's chat template around them, whose rows encode --chat keeps.")
    system: str | None = option("With --chat, the system turn.")
    before: str = opt.CHAT_BEFORE
    served_name: str | None = option("The model's name in that body; by default --model.")
    max_tokens: int = option("In that body.", default=64, type=click.IntRange(1))
    model: str | None = option("Folder or name; needed where the store has several models.", envvar="KVWIRE_MODEL")
    place: StoreOptions = opt.STORE
    as_json: bool = opt.JSON


@command(_SaltOptions)
def salt(options: _SaltOptions) -> None:
    """Print the cache_salt that a request to vLLM needs, or with --question the body of the request.

    The salt names tenant, model, documents (of prefixes, the profile), level, deadline, objective and repaired rows: no
    other request shares what vLLM keeps of it. Without the right one, vLLM computes all, and its answer tells the salt.
    """
    from kvwire.runtime.corpus import Corpus
    from kvwire.types import Chat
    from kvwire.vllm import Choice, chat_body, request_body, request_salt

    named = {name: getattr(options, name) for name in ("level", "deadline_s", "objective", "repair")}
    chosen = {name: value for name, value in named.items() if value is not None}
    names = [*options.docs, *options.more_docs]
    flags = {name: True for name in ("prefix", "save") if getattr(options, name)}
    if (options.system is not None or options.before) and not options.chat:
        raise ArgumentError("--system and --before are of a chat: give --chat, too")
    if options.chat and (options.question is None or options.computed):
        raise ArgumentError("--chat makes a whole request: give --question, and leave out --computed")
    if not (names or options.prefix):
        raise ArgumentError("name documents with --docs, or ask for --prefix: what only keeps a prompt needs no salt")
    choice = Choice.read(({"documents": names} if names else {}) | flags | chosen)
    model, place = options.model or "", options.place
    with place.opened() as store:
        corpus = Corpus.open(store, model=model_name(model), **place.whose())
        if options.question is None:
            value = request_salt(corpus, choice)
            say(json.dumps({"cache_salt": value}) if options.as_json else value)
            return
        if not model or not Path(model).expanduser().is_dir():
            raise ArgumentError("--question is read with the model's tokenizer: give --model FOLDER")
        more = {"model": options.served_name or model, "max_tokens": options.max_tokens, "temperature": 0}
        if options.chat:
            chat = Chat(options.system, before=options.before)
            say(json.dumps(chat_body(corpus, choice, chat, options.question, tokenizer=model, **more)))
            return
        question = open_tokenizer(model)(options.question, "last", "frame")
        say(json.dumps(request_body(corpus, choice, question, computed=options.computed, **more)))
