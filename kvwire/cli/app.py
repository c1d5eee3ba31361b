"""The command line. Here: encode, inspect, ask, demo; the other commands have modules of their own.

Data goes to stdout, progress and errors to stderr. Every command takes ``--json``. Exit codes: 0 done, 2 wrong usage,
3 not found, 4 corrupt, 5 not allowed, 6 deadline missed, 7 disk or network failed, 8 does not belong together.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvwire._version import __version__
from kvwire.cli.options import StoreOptions, key, store_options
from kvwire.cli.plan import plan
from kvwire.cli.printing import describe, described, print_answer, print_encoded, print_levels
from kvwire.cli.serve import serve, sign, token
from kvwire.cli.simulate import simulate
from kvwire.cli.store import store_group
from kvwire.codec import DEFAULT_METHOD, methods
from kvwire.errors import ArgumentError, DeadlineError, KvwireError, NotFoundError, StorageError
from kvwire.runtime.text_files import problem_with, read_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.codec import Backend
    from kvwire.controller import Objective
    from kvwire.engines.transformers import TransformersEngine
    from kvwire.runtime.corpus import Corpus, Encoded
    from kvwire.store import UseFile

_MODEL = click.option("--model", required=True, envvar="KVWIRE_MODEL", help="Folder of a Hugging Face causal model.")
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
_BACKEND = click.option(
    "--backend",
    default="auto",
    show_default=True,
    envvar="KVWIRE_BACKEND",
    type=click.Choice(["auto", "triton", "numba"]),
    help="Kernels that code caches; auto: Triton's on a GPU.",
)
_USES = click.option("--uses", envvar="KVWIRE_USES", metavar="FILE", help="Where uses of documents are counted.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


def main() -> None:
    """Run the command line; translates kvwire errors into messages and exit codes."""
    as_json = "--json" in sys.argv[1:]
    try:
        cli.main(prog_name="kvwire", standalone_mode=False)
    except click.ClickException as error:
        if as_json:
            click.echo(json.dumps({"error": {"kind": "UsageError", "message": error.format_message()}}))
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except KvwireError as error:
        if as_json:
            click.echo(json.dumps(described(error)))
        click.echo(f"kvwire: {error}", err=True)
        sys.exit(error.exit_code)


def _end(error: KvwireError) -> None:
    """Leave with an error after what there is has been printed, the error with it where that was JSON."""
    click.echo(f"kvwire: {error}", err=True)
    sys.exit(error.exit_code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvwire")
def cli() -> None:
    """Ship the KV caches of language models like media."""


@cli.command()
@click.argument("paths", nargs=-1, required=True)
@_MODEL
@store_options
@_DEVICE
@_DTYPE
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
    "--encode-after",
    default=0,
    type=click.IntRange(0),
    metavar="N",
    help="Keep documents with fewer than N counted uses as text; needs --uses.",
)
@_USES
@_BACKEND
@_JSON
def encode(
    paths: tuple[str, ...],
    model: str,
    place: StoreOptions,
    device: str,
    dtype: str,
    force: bool,
    method: str,
    prefix_layers: int,
    lossless: bool,
    encode_after: int,
    uses: str | None,
    backend: Backend,
    as_json: bool,
) -> None:
    """Encode text files, or all .txt and .md files of folders, into a store.

    A document's id is its path below the folder named, without its ending. What the catalog has already is skipped.
    """
    from kvwire.runtime.corpus import Coding, Corpus, Document

    failures: dict[str, str] = {}
    texts = read_texts(paths, failures)
    engine = _engine(model, device, dtype)
    opened, coding = place.open_lasting(), Coding(method, prefix_layers, lossless, backend=backend)
    corpus = Corpus(engine, opened, **place.whose(), coding=coding, uses=_use_file(uses))
    documents = []
    for document_id, text in texts.items():
        ids = engine.tokenize(text)
        problem = problem_with(ids, engine.window)
        if problem:
            failures[document_id] = problem
        else:
            documents.append(Document(document_id, tuple(ids)))
    done = _encode_all(corpus, documents, force=force, encode_after=encode_after)
    error = None
    if failures:
        error = ArgumentError(f"{len(failures)} of {len(done) + len(failures)} documents were left out")
    print_encoded(done, failures, as_json=as_json, error=error)
    if error:
        _end(error)


def _engine(model: str, device: str, dtype: str) -> TransformersEngine:
    import torch

    from kvwire.engines.transformers import open_engine

    if dtype == "auto":
        chosen = torch.float32 if device == "cpu" else None
    else:
        chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    return open_engine(model, device=device, dtype=chosen)


def _use_file(path: str | None) -> UseFile | None:
    from kvwire.store import UseFile

    return UseFile(path) if path else None


def _encode_all(corpus: Corpus, documents: Sequence[Any], *, force: bool, encode_after: int) -> list[Encoded]:
    from tqdm import tqdm

    done = []
    total = sum(len(document.token_ids) for document in documents)
    with tqdm(total=total, unit="tok", disable=None, desc="encoding", file=sys.stderr) as bar:
        for encoded in corpus.encode(documents, force=force, encode_after=encode_after):
            done.append(encoded)
            bar.update(encoded.entry.tokens)
    return done


for _command in (key, plan, serve, sign, simulate, store_group, token):
    cli.add_command(_command)


@cli.command()
@click.argument("blob")
@click.option("--model", envvar="KVWIRE_MODEL", help="To look BLOB up as a document's id in the store.")
@store_options
@_JSON
def inspect(blob: str, model: str | None, place: StoreOptions, as_json: bool) -> None:
    """Show what a blob holds: a .kvw file, which is checked to its end, or a document of a store."""
    from kvwire.codec import verify

    path = Path(blob)
    if path.is_file():
        try:
            info = verify(path.read_bytes())
        except OSError as error:
            msg = f"{path} cannot be read ({error.strerror})"
            raise StorageError(msg) from error
    elif place.store and model:
        from kvwire.runtime.corpus import Corpus

        with closing(place.open()) as opened:
            corpus = Corpus(_engine(model, "cpu", "auto"), opened, **place.whose())
            info = corpus.read_header(corpus.find(blob))
    else:
        msg = f"{blob} is no file; to look up a document name --store and --model"
        raise NotFoundError(msg)
    if as_json:
        click.echo(json.dumps(describe(info)))
        return
    click.echo(f"{info.tokens} tokens in {info.chunks} chunks, {info.file_bytes:,} bytes (head {info.header_bytes:,})")
    click.echo(
        f"model {info.meta.model_id} ({info.meta.model_revision[:12]}), profile {info.profile_digest[:12] or 'inside'}"
    )
    if info.prefix_layers or info.method != DEFAULT_METHOD:
        click.echo(f"method {info.method}, coded for a head start of {info.prefix_layers} layers")
    print_levels([info])


@cli.command()
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
    "--floor",
    default=0,
    show_default=True,
    type=click.IntRange(0, 7),
    help="Lowest level to use where there is a choice.",
)
@click.option(
    "--ceiling",
    type=click.IntRange(0, 7),
    help="Finest level that is worth waiting for; any without it.",
)
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
@_USES
@_MODEL
@store_options
@_DEVICE
@_DTYPE
@_BACKEND
@_JSON
def ask(
    docs: tuple[str, ...],
    more_docs: tuple[str, ...],
    question: str,
    deadline: float | None,
    link: str | None,
    floor: int,
    ceiling: int | None,
    objective: Objective | None,
    tokens: int,
    texts: str | None,
    variants: tuple[str, ...],
    uses: str | None,
    model: str,
    place: StoreOptions,
    device: str,
    dtype: str,
    backend: Backend,
    as_json: bool,
) -> None:
    """Answer a question over documents of a store: --docs A B C --question "..."."""
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.loader import Loader, LoadSettings
    from kvwire.transport import parse_link

    names = [*docs, *more_docs]
    engine = _engine(model, device, dtype)
    settings = LoadSettings(quality_floor=floor, quality_ceiling=ceiling, backend=backend)
    known = {name: engine.tokenize(text) for name, text in read_texts([texts]).items()} if texts else None
    with closing(place.open()) as opened:
        corpus = Corpus(engine, opened, **place.whose(), uses=_use_file(uses))
        others = [Corpus(engine, opened, **(place.whose() | {"tenant": tenant})) for tenant in variants]
        emulated = parse_link(link) if link else None
        loader = Loader(engine, corpus, variants=others, link=emulated, settings=settings)
        answer = loader.ask(
            names, engine.tokenize(question), deadline_s=deadline, objective=objective, tokens=tokens, texts=known
        )
    error = None
    if deadline is not None and answer.timing.ttft_s > deadline:
        error = DeadlineError(
            f"the first token came after {answer.timing.ttft_s:.3f} s, the deadline was {deadline:g} s"
        )
    print_answer(names, answer, as_json=as_json, error=error)
    if error:
        _end(error)


@cli.command()
@click.option("--model", default="demo/model", show_default=True, envvar="KVWIRE_MODEL")
@click.option("--documents", default="demo/documents", show_default=True, help="Folder of .txt or .md files.")
@click.option(
    "--questions", help="JSON list of {documents, question}; default: questions.json beside the documents, if any."
)
@click.option("--out", default="demo/out", show_default=True, help="Where demo.json and the picture go.")
@click.option("--link", "links", multiple=True, help="name=50mbit,20ms; default: slow, middling and fast ones.")
@click.option(
    "--bound", default=0.02, show_default=True, help="KL divergence from exact caches, of any prompt, that is an error."
)
@click.option(
    "--agreement", default=0.9, show_default=True, help="Share of equal next tokens below which it is an error."
)
@_JSON
def demo(
    model: str,
    documents: str,
    questions: str | None,
    out: str,
    links: tuple[str, ...],
    bound: float,
    agreement: float,
    as_json: bool,
) -> None:
    """Compare text recompute, raw KV and kvwire on your documents and model, over three emulated links."""
    from kvwire.comparison.run import run_demo

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
    worst = max(kl for link in report["links"] for kl in link["kl_of_each_prompt"])
    least = min(link["greedy_agreement"] for link in report["links"])
    error = None
    if worst > bound or least < agreement:
        error = KvwireError(
            f"answers differ: KL divergence up to {worst:.4f} nats, {least:.0%} of the next tokens agree"
        )
    if as_json:
        click.echo(json.dumps(report | ({"error": described(error)["error"]} if error else {})))
    if error:
        _end(error)


def _beside(documents: str) -> str | None:
    path = Path(documents).resolve().parent / "questions.json"
    return str(path) if path.is_file() else None
