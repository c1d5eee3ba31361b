"""The command line: encode, serve, inspect, ask, demo.

Data goes to stdout, progress and errors to stderr. Every command takes ``--json``. Exit codes: 0 done, 2 wrong usage,
3 not found, 4 corrupt, 5 not allowed, 6 deadline missed, 7 disk or network failed, 8 does not belong together.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvwire import __version__
from kvwire.errors import ArgumentError, DeadlineError, KvwireError, NotFoundError, StorageError
from kvwire.printing import describe, print_answer, print_encoded, print_levels
from kvwire.texts import problem_with, read_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.corpus import Corpus, Encoded
    from kvwire.engines.transformers import TransformersEngine
    from kvwire.store import Store

_MODEL = click.option("--model", required=True, envvar="KVWIRE_MODEL", help="Folder of a Hugging Face causal model.")
_STORE = click.option("--store", required=True, envvar="KVWIRE_STORE", help="file:///folder or http://host:port.")
_TENANT = click.option(
    "--tenant", default="default", envvar="KVWIRE_TENANT", show_default=True, help="Whose documents."
)
_TOKEN = click.option("--token", envvar="KVWIRE_TOKEN", help="Bearer token for http stores.")
_DEVICE = click.option(
    "--device", default="cpu", envvar="KVWIRE_DEVICE", show_default=True, help="Where the model runs."
)
_DTYPE = click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="auto: float32 on the CPU, elsewhere as the weights are stored.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


def main() -> None:
    """Run the command line; translates kvwire errors into messages and exit codes."""
    as_json = "--json" in sys.argv[1:]
    try:
        cli.main(prog_name="kvwire", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except KvwireError as error:
        if as_json:
            click.echo(json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}}))
        click.echo(f"kvwire: {error}", err=True)
        sys.exit(error.exit_code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvwire")
def cli() -> None:
    """Ship the KV caches of language models like media."""


@cli.command()
@click.argument("paths", nargs=-1, required=True)
@_MODEL
@_STORE
@_TENANT
@_DEVICE
@_DTYPE
@_JSON
def encode(paths: tuple[str, ...], model: str, store: str, tenant: str, device: str, dtype: str, as_json: bool) -> None:
    """Encode text files, or all .txt and .md files of folders, into a store.

    A document's id is its path below the folder named, without its ending. What the catalog has already is skipped.
    """
    from kvwire.corpus import Corpus, Document

    texts = read_texts(paths)
    engine = _engine(model, device, dtype)
    corpus = Corpus(engine, _open(store, None), tenant=tenant)
    documents, failures = [], {}
    for document_id, text in texts.items():
        ids = engine.tokenize(text)
        problem = problem_with(ids, engine.window)
        if problem:
            failures[document_id] = problem
        else:
            documents.append(Document(document_id, tuple(ids)))
    done = _encode_all(corpus, documents)
    print_encoded(done, failures, as_json=as_json)
    if failures:
        msg = f"{len(failures)} of {len(texts)} documents were left out; the others are stored"
        raise ArgumentError(msg)


def _engine(model: str, device: str, dtype: str) -> TransformersEngine:
    import torch
    from transformers.utils import logging

    from kvwire.engines.transformers import open_engine

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if dtype == "auto":
        chosen = torch.float32 if device == "cpu" else None
    else:
        chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    return open_engine(model, device=device, dtype=chosen)


def _open(store: str, token: str | None) -> Store:
    from kvwire.open import open_store

    return open_store(store, token=token)


def _encode_all(corpus: Corpus, documents: Sequence[Any]) -> list[Encoded]:
    from tqdm import tqdm

    done = []
    total = sum(len(document.token_ids) for document in documents)
    with tqdm(total=total, unit="tok", disable=None, desc="encoding", file=sys.stderr) as bar:
        for encoded in corpus.encode(documents):
            done.append(encoded)
            bar.update(encoded.info.tokens)
    return done


@cli.command()
@_STORE
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8473, show_default=True, help="0: any free port.")
@_TOKEN
@_JSON
def serve(store: str, host: str, port: int, token: str | None, as_json: bool) -> None:
    """Serve a store's blobs over HTTP until interrupted; other machines need --token."""
    from kvwire.transport import serve as serve_store

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with serve_store(_open(store, None), host, port, token=token) as url:
            click.echo(json.dumps({"url": url}) if as_json else f"serving {store} at {url}")
            sys.stdout.flush()
            await stop.wait()

    asyncio.run(run())


@cli.command()
@click.argument("blob")
@click.option("--store", envvar="KVWIRE_STORE", help="Look BLOB up as a document's id in this store; needs --model.")
@click.option("--model", envvar="KVWIRE_MODEL")
@_TENANT
@_TOKEN
@_JSON
def inspect(blob: str, store: str | None, model: str | None, tenant: str, token: str | None, as_json: bool) -> None:
    """Show what a blob holds: a .kvw file, or a document of a store."""
    from kvwire.codec import inspect as read

    path = Path(blob)
    if path.is_file():
        try:
            data = path.read_bytes()
        except OSError as error:
            msg = f"{path} cannot be read ({error.strerror})"
            raise StorageError(msg) from error
    elif store and model:
        from kvwire.corpus import Corpus

        with closing(_open(store, token)) as opened:
            entry = Corpus(_engine(model, "cpu", "auto"), opened, tenant=tenant).find(blob)
            data = opened.get(entry.blob_key, 0, entry.head_bytes)
    else:
        msg = f"{blob} is no file; to look up a document name --store and --model"
        raise NotFoundError(msg)
    info = read(data)
    if as_json:
        click.echo(json.dumps(describe(info)))
        return
    click.echo(f"{info.tokens} tokens in {info.chunks} chunks, {info.file_bytes:,} bytes (head {info.head_bytes:,})")
    click.echo(
        f"model {info.meta.model_id} ({info.meta.model_revision[:12]}), profile {info.profile_digest[:12] or 'inside'}"
    )
    print_levels([info])


@cli.command()
@click.option("--docs", "docs", multiple=True, required=True, help="Ids of documents, in the prompt's order.")
@click.argument("more_docs", nargs=-1)
@click.option("--question", required=True, help="What the model continues after the documents.")
@click.option("--deadline", type=float, help="Seconds to the first token; without it, the soonest first token.")
@click.option("--link", help="Emulate a link: 50mbit or 50mbit,20ms.")
@click.option("--floor", default=0, show_default=True, help="Lowest level to use where there is a choice.")
@click.option("--tokens", default=32, show_default=True, help="Length of the answer at most.")
@click.option("--texts", help="Folder of the documents' texts, for those whose blob is lost.")
@_MODEL
@_STORE
@_TENANT
@_TOKEN
@_DEVICE
@_DTYPE
@_JSON
def ask(
    docs: tuple[str, ...],
    more_docs: tuple[str, ...],
    question: str,
    deadline: float | None,
    link: str | None,
    floor: int,
    tokens: int,
    texts: str | None,
    model: str,
    store: str,
    tenant: str,
    token: str | None,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Answer a question over documents of a store: --docs A B C --question "..."."""
    from kvwire.corpus import Corpus
    from kvwire.load import Loader, LoadSettings
    from kvwire.transport import parse_link

    names = [name for given in (*docs, *more_docs) for name in given.split(",") if name]
    engine = _engine(model, device, dtype)
    settings = LoadSettings(quality_floor=floor)
    known = {name: engine.tokenize(text) for name, text in read_texts([texts]).items()} if texts else None
    with closing(_open(store, token)) as opened:
        corpus = Corpus(engine, opened, tenant=tenant)
        loader = Loader(engine, corpus, link=parse_link(link) if link else None, settings=settings)
        answer = loader.ask(names, engine.tokenize(question), deadline_s=deadline, tokens=tokens, texts=known)
    print_answer(names, answer, as_json=as_json)
    if deadline is not None and answer.timing.ttft_s > deadline:
        msg = f"the first token came after {answer.timing.ttft_s:.3f} s, the deadline was {deadline:g} s"
        raise DeadlineError(msg)


@cli.command()
@click.option("--model", default="demo/model", show_default=True, envvar="KVWIRE_MODEL")
@click.option("--documents", default="demo/documents", show_default=True, help="Folder of .txt or .md files.")
@click.option(
    "--questions", help="JSON list of {documents, question}; default: questions.json beside the documents, if any."
)
@click.option("--out", default="demo/out", show_default=True, help="Where demo.json and the picture go.")
@click.option("--link", "links", multiple=True, help="name=50mbit,20ms; default: slow, middling and fast ones.")
@click.option("--bound", default=0.02, show_default=True, help="Mean KL divergence from exact caches that is an error.")
@_JSON
def demo(
    model: str, documents: str, questions: str | None, out: str, links: tuple[str, ...], bound: float, as_json: bool
) -> None:
    """Compare text recompute, raw KV and kvwire on your documents and model, over three emulated links."""
    from kvwire.demo import run_demo

    for path in (model, documents):
        if not Path(path).is_dir():
            msg = f"{path} is not a folder; run this in the repository, or name --model and --documents of your own"
            raise NotFoundError(msg)
    texts = read_texts([documents])
    report = run_demo(
        _engine(model, "cpu", "auto"),
        texts,
        questions=questions or _beside(documents),
        out=Path(out),
        links=links,
        say=lambda line: click.echo(line, err=as_json),
    )
    if as_json:
        click.echo(json.dumps(report))
    worst = max(link["kl"] for link in report["links"])
    if worst > bound:
        msg = f"answers differ: mean KL divergence {worst:.4f} nats is above the bound of {bound:g}"
        raise KvwireError(msg)


def _beside(documents: str) -> str | None:
    path = Path(documents).resolve().parent / "questions.json"
    return str(path) if path.is_file() else None
