"""``kvwire inspect``: what a blob holds."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.cli import options as opt
from kvwire.cli.inputs import model_name, open_engine, read_file
from kvwire.cli.options import StoreOptions, argument, command, option
from kvwire.cli.printing import describe, print_levels
from kvwire.cli.say import say
from kvwire.codec import DEFAULT_METHOD
from kvwire.errors import NotFoundError

if TYPE_CHECKING:
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import Store
    from kvwire.types import BlobInfo


@dataclass(frozen=True)
class _InspectOptions:
    """What ``kvwire inspect`` is given."""

    blob: str = argument()
    model: str | None = option(
        "Whose document BLOB is: folder or name; needed where the store has several.", envvar="KVWIRE_MODEL"
    )
    place: StoreOptions = opt.STORE
    as_json: bool = opt.JSON


@command(_InspectOptions)
def inspect(options: _InspectOptions) -> None:
    """Show what a blob holds: a .kvw file, which is checked to its end, or a document of a store."""
    info = _info(options.blob, options.model, options.place)
    if options.as_json:
        say(json.dumps(describe(info)))
        return
    say(f"{info.tokens} tokens in {info.chunks} chunks, {info.file_bytes:,} bytes (header {info.header_bytes:,})")
    say(f"model {info.meta.model_id} ({info.meta.model_revision[:12]}), profile {info.profile_digest[:12] or 'inside'}")
    if info.prefix_layers or info.method != DEFAULT_METHOD:
        computed = f", coded for readers that compute the first {info.prefix_layers} layers"
        say(f"method {info.method}{computed if info.prefix_layers else ''}")
    if info.deviation:
        say(f"says how far tokens move behind other documents, by blocks of {info.deviation.block}")
    if info.neutral_prefix:
        bos = f", the first {info.opening} of them the tokenizer's BOS" if info.opening else ""
        say(f"computed behind {len(info.neutral_prefix)} tokens that were dropped{bos}")
    if info.soft_tokens:
        say(f"computed with {info.soft_tokens.count} soft tokens, {info.soft_tokens.digest[:12]}")
    if info.prefix:
        say(f"a part of document {info.prefix.document!r}, behind its first {info.prefix.tokens} tokens")
    print_levels([info])


def _info(blob: str, model: str | None, place: StoreOptions) -> BlobInfo:
    path = Path(blob)
    if path.is_file():
        from kvwire.codec import verify

        return verify(read_file(path, "name a .kvw file, as kvwire encode writes them"))
    if not place.store:
        raise NotFoundError(f"{blob} is no file; to look up a document name --store")
    with closing(place.open()) as opened:
        corpus = _corpus(opened, model, place)
        return corpus.read_header(corpus.find(blob))


def _corpus(store: Store, model: str | None, place: StoreOptions) -> Corpus:
    """From the store's record of the model; from the model itself where a folder is named and there is no record."""
    from kvwire.runtime.corpus import Corpus

    try:
        return Corpus.open(store, model=model_name(model) if model else "", **place.whose())
    except NotFoundError:
        if not model or not Path(model).expanduser().is_dir():
            raise
    return Corpus(open_engine(model), store, **place.whose())
