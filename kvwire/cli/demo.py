"""``kvwire demo``: the comparison, on one's own documents and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from kvwire.cli.engines import open_engine
from kvwire.cli.failures import error_as_data, leave
from kvwire.cli.options import JSON
from kvwire.cli.say import say, say_text
from kvwire.errors import KvwireError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping


class _DemoOptions(TypedDict):
    model: str
    documents: str
    questions: str | None
    out: str
    links: tuple[str, ...]
    bound: float
    agreement: float
    as_json: bool


@click.command()
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
@JSON
def demo(**options: Unpack[_DemoOptions]) -> None:
    """Compare text recompute, raw KV and kvwire on your documents and model, over three emulated links."""
    from kvwire.comparison.run import run_demo
    from kvwire.runtime.text_files import read_texts

    for path in (options["model"], options["documents"]):
        if not Path(path).is_dir():
            msg = f"{path} is not a folder; run this in the repository, or name --model and --documents of your own"
            raise NotFoundError(msg)
    report = run_demo(
        open_engine(options["model"]),
        read_texts([options["documents"]]),
        questions=options["questions"] or _beside(options["documents"]),
        out=Path(options["out"]),
        links=options["links"],
        say=lambda text: say_text(text, err=options["as_json"]),
    )
    error = _difference(report, options["bound"], options["agreement"])
    if options["as_json"]:
        say(json.dumps({**report, **error_as_data(error)}))
    if error:
        leave(error)


def _difference(report: Mapping[str, Any], bound: float, agreement: float) -> KvwireError | None:
    """An error where answers differ by more than is allowed."""
    worst = max(kl for link in report["links"] for kl in link["kl_of_each_prompt"])
    least = min(link["greedy_agreement"] for link in report["links"])
    if worst <= bound and least >= agreement:
        return None
    return KvwireError(f"answers differ: KL divergence up to {worst:.4f} nats, {least:.0%} of the next tokens agree")


def _beside(documents: str) -> str | None:
    path = Path(documents).resolve().parent / "questions.json"
    return str(path) if path.is_file() else None
