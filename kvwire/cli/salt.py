"""``kvwire salt``: what a request to vLLM must carry to get linked documents or a stored prefix."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvwire.cli.engines import model_name, open_tokenizer
from kvwire.cli.options import JSON, StoreOptions, store_options, takes
from kvwire.cli.say import say
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.engines.vllm.requests import Choice
    from kvwire.runtime.corpus import Corpus


@click.command()
@click.option("--docs", multiple=True, help="Ids of documents of the store, in the prompt's order.")
@click.argument("more_docs", nargs=-1)
@click.option("--computed", multiple=True, help="Documents behind those, for vLLM to compute; with --question.")
@click.option("--prefix", is_flag=True, help="Instead of documents: the longest prefix that the store's index knows.")
@click.option("--save", is_flag=True, help="Have vLLM keep what it computes of the prompt; changes no salt.")
@click.option("--repair", type=click.Choice(["kept"]), help="Lay over them what ask --keep-repairs computed and kept.")
@click.option("--level", type=click.IntRange(0), help="Quality level of all chunks.")
@click.option("--deadline", "deadline_s", type=click.FloatRange(min=0, min_open=True), help="Seconds to load for.")
@click.option("--objective", type=click.Choice(["earliest", "quality", "cheapest"]))
@click.option("--question", help="Print the body of a whole request that ends with this; needs --model as a folder.")
@click.option("--chat", is_flag=True, help="Put the model's chat template around them, whose rows encode --chat keeps.")
@click.option("--system", help="With --chat, the system turn.")
@click.option("--before", default="", help="With --chat, the user's words before the documents.")
@click.option("--served-name", help="The model's name in that body; by default --model.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(1), help="In that body.")
@click.option("--model", envvar="KVWIRE_MODEL", help="Folder or name; needed where the store has several models.")
@store_options
@takes(JSON)
def salt(*, place: StoreOptions, as_json: bool, **given: Any) -> None:  # noqa: ANN401 - click's values
    """Print the cache_salt that a request to vLLM needs, or with --question the body of the request.

    The salt names tenant, model, documents (of prefixes, the profile), level, deadline, objective and repaired rows: no
    other request shares what vLLM keeps of it. Without the right one, vLLM computes all, and its answer tells the salt.
    """
    from kvwire.runtime.corpus import Corpus
    from kvwire.vllm import Choice, request_body, request_salt

    chosen = {name: given[name] for name in ("level", "deadline_s", "objective", "repair") if given[name] is not None}
    names = [*given["docs"], *given["more_docs"]]
    flags = {name: True for name in ("prefix", "save") if given[name]}
    if (given["system"] is not None or given["before"]) and not given["chat"]:
        msg = "--system and --before are of a chat: give --chat, too"
        raise ArgumentError(msg)
    if given["chat"] and (given["question"] is None or given["computed"]):
        msg = "--chat makes a whole request: give --question, and leave out --computed"
        raise ArgumentError(msg)
    choice = Choice.read(({"documents": names} if names else {}) | flags | chosen)
    if not choice.mode:
        msg = "name documents with --docs, or ask for --prefix: what only keeps a prompt needs no salt"
        raise ArgumentError(msg)
    model = given["model"] or ""
    with closing(place.open_lasting(exists=True)) as store:
        corpus = Corpus.open(store, model=model_name(model), **place.whose())
        if given["question"] is None and not given["chat"]:
            value = request_salt(corpus, choice)
            say(json.dumps({"cache_salt": value}) if as_json else value)
            return
        if not model or not Path(model).expanduser().is_dir():
            msg = "--question is read with the model's tokenizer: give --model FOLDER"
            raise ArgumentError(msg)
        more = {"model": given["served_name"] or model, "max_tokens": given["max_tokens"], "temperature": 0}
        if given["chat"]:
            say(json.dumps(_chat_body(corpus, choice, given, model, more)))
            return
        question = open_tokenizer(model)(given["question"], "last", "frame")
        say(json.dumps(request_body(corpus, choice, question, computed=given["computed"], **more)))


def _chat_body(corpus: Corpus, choice: Choice, given: dict[str, Any], model: str, more: dict[str, Any]) -> object:
    from kvwire.types import Chat
    from kvwire.vllm import chat_body

    chat = Chat(given["system"], before=given["before"])
    return chat_body(corpus, choice, chat, given["question"], tokenizer=model, **more)
