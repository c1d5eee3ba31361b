"""``kvwire append``: documents that grow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import open_engine
from kvwire.cli.options import StoreOptions, argument, command, flag, option
from kvwire.cli.say import say
from kvwire.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.codec import Backend
    from kvwire.runtime.coding import Encoded


@dataclass(frozen=True)
class _AppendOptions:
    """What ``kvwire append`` is given."""

    document: str = argument()
    text: str | None = option("Text to append.")
    file: Path | None = option("File with the text to append, in UTF-8.")
    after: int | None = option(
        "Append only if DOCUMENT has this many tokens (every append prints the number): repeating the command is safe.",
        metavar="TOKENS", type=click.IntRange(0),
    )  # fmt: skip
    fork: str = option("Leave DOCUMENT unchanged, and store the result under NAME.", default="", metavar="NAME")
    compact: bool = flag("Encode DOCUMENT again as one blob, after appending.")
    model: str = opt.MODEL
    place: StoreOptions = opt.STORE
    device: str = opt.DEVICE
    dtype: str = opt.DTYPE
    backend: Backend = opt.BACKEND
    as_json: bool = opt.JSON


@command(_AppendOptions)
def append(options: _AppendOptions) -> None:
    """Append text to a document, encoding the new tokens alone."""
    from kvwire.runtime.coding import Coding
    from kvwire.runtime.corpus import Corpus

    text = _text(options.text, options.file, is_needed=not options.compact)
    for name in ("fork", "after"):
        if getattr(options, name) not in ("", None) and not text:
            raise ArgumentError(f"--{name} is about what is appended: give --text or --file too, or leave out --{name}")
    engine = open_engine(options.model, options.device, options.dtype)
    with options.place.opened() as store:
        corpus = Corpus(engine, store, **options.place.whose(), coding=Coding(backend=options.backend))
        done: list[Encoded] = []
        new = engine.tokenize(text) if text else ()
        if text:
            done.append(corpus.append(options.document, new, after=options.after, fork=options.fork))
        if options.compact:
            done.append(corpus.compact(options.fork or options.document))
    entry, is_there = done[-1].entry, bool(text) and done[0].skipped
    added = 0 if is_there else len(new)
    written = sum(each.info.file_bytes for each in done if not each.skipped)
    if options.as_json:
        about = {"id": entry.document_id, "tokens": entry.tokens, "added": added, "skipped": is_there}
        sizes = {"parts": max(1, len(entry.parts)), "written_bytes": written, "bytes": entry.size}
        say(json.dumps(about | sizes))
        return
    news = "there already" if is_there else f"{added} more"
    say(
        f"{entry.document_id}: {entry.tokens} tokens ({news}) in {max(1, len(entry.parts))} parts, "
        f"{written:,} bytes written"
    )


def _text(text: str | None, file: Path | None, *, is_needed: bool) -> str:
    """What is to be appended; empty where nothing is, and nothing has to be."""
    from kvwire.runtime.text_files import decoded_text, read_part

    if (text is None) == (file is None):
        if text is None and not is_needed:
            return ""
        raise ArgumentError("give what is to be appended: --text TEXT, or --file FILE")
    if file is not None:
        if not file.is_file():
            raise NotFoundError(f"{file} is not a file; check --file")
        text = decoded_text(read_part(str(file)), str(file))
    if not text:
        raise ArgumentError("the text to append is empty; give some, or leave out --text and --file")
    return text
