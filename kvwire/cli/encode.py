"""``kvwire encode``: text files into a store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from kvwire._printable import name_problem
from kvwire.cli.engines import open_engine
from kvwire.cli.failures import leave
from kvwire.cli.options import (
    BACKEND,
    DEVICE,
    DTYPE,
    INDEX,
    JSON,
    MODEL,
    USES,
    StoreOptions,
    store_options,
    use_file,
)
from kvwire.cli.printing import print_document, print_encoded
from kvwire.codec import DEFAULT_METHOD, methods
from kvwire.errors import ArgumentError
from kvwire.runtime.text_files import problem_with, read_texts, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvwire.codec import Backend
    from kvwire.engines.base import Engine
    from kvwire.runtime.coding import Document, Encoded


class _EncodeOptions(TypedDict):
    paths: tuple[str, ...]
    model: str
    device: str
    dtype: str
    force: bool
    method: str
    prefix_layers: int
    lossless: bool
    deviation: bool
    neutral_prefix: int
    encode_after: int
    resume: Path | None
    index: tuple[str, ...]
    uses: str | None
    backend: Backend
    as_json: bool


@click.command()
@click.argument("paths", nargs=-1, required=True)
@MODEL
@store_options
@DEVICE
@DTYPE
@click.option("--force", is_flag=True, help="Encode again even what the store seems to have.")
@click.option("--method", type=click.Choice(methods()), default=DEFAULT_METHOD, show_default=True)
@click.option(
    "--prefix-layers",
    "--head-start",
    "prefix_layers",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Layers that readers compute anew, which makes blobs smaller; --head-start is the old name.",
)
@click.option("--lossless", is_flag=True, help="Add a level that holds every number bit for bit.")
@click.option(
    "--deviation", is_flag=True, help="Measure how far tokens move behind others, for ask --selector product."
)
@click.option(
    "--neutral-prefix",
    default=0,
    metavar="N",
    type=click.IntRange(0),
    help="Compute documents behind N of their own last tokens, which are dropped: links lose less.",
)
@click.option(
    "--encode-after",
    default=0,
    type=click.IntRange(0),
    metavar="N",
    help="Keep documents with fewer than N counted uses as text; needs --uses.",
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep in this file how far the fit of a profile has got; one that was interrupted goes on from it.",
)
@INDEX
@USES
@BACKEND
@JSON
def encode(place: StoreOptions, **options: Unpack[_EncodeOptions]) -> None:
    """Encode text files, or all .txt and .md files of folders, into a store.

    A document's id is its path below the folder named, without its ending. What the catalog has already is skipped. A
    document's line is printed once the store holds it.
    """
    from kvwire.runtime.coding import Coding
    from kvwire.runtime.corpus import Corpus

    failures: dict[str, str] = {}
    texts = read_texts(options["paths"], failures)
    engine = open_engine(options["model"], options["device"], options["dtype"])
    coding = Coding(
        options["method"], options["prefix_layers"], options["lossless"], backend=options["backend"],
        deviation=options["deviation"], neutral_prefix=options["neutral_prefix"], resume=options["resume"],
    )  # fmt: skip
    corpus = Corpus(engine, place.open_lasting(), **place.whose(), coding=coding, uses=use_file(options["uses"]))
    documents = _documents(engine, texts, failures)
    encoded = corpus.encode(
        documents, force=options["force"], encode_after=options["encode_after"], index=options["index"]
    )
    tokens = sum(len(document.token_ids) for document in documents)
    done = _told(encoded, tokens, as_json=options["as_json"])
    error = None
    if failures:
        error = ArgumentError(f"{len(failures)} of {len(done) + len(failures)} documents were left out")
    print_encoded(done, failures, as_json=options["as_json"], error=error)
    if error:
        leave(error)


def _documents(engine: Engine, texts: Mapping[str, str], failures: dict[str, str]) -> list[Document]:
    """Texts as token ids; those that cannot be encoded go to ``failures``, and so do those with impossible names."""
    from kvwire.runtime.coding import Document

    documents = []
    for document_id, text in texts.items():
        if wrong := name_problem(document_id):
            failures[document_id] = f"its name holds {wrong}; rename the file"
            continue
        ids = token_ids(engine.tokenize, engine.window, text)
        problem = problem_with(ids, engine.window)
        if problem:
            failures[document_id] = problem
        else:
            documents.append(Document(document_id, tuple(ids)))
    return documents


def _told(encoded: Iterator[Encoded], tokens: int, *, as_json: bool) -> list[Encoded]:
    """Documents as they are done, each told at once but as JSON, where all are one object."""
    from tqdm import tqdm

    done = []
    with tqdm(total=tokens, unit="tok", disable=None, desc="encoding", file=sys.stderr) as bar:
        for each in encoded:
            done.append(each)
            bar.update(each.entry.tokens)
            if not as_json:
                with tqdm.external_write_mode():
                    print_document(each)
    return done
