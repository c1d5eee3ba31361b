"""``kvwire demo``: the comparison, on one's own documents and model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire.cli import options as opt
from kvwire.cli.inputs import open_engine
from kvwire.cli.options import command, option
from kvwire.cli.say import finish, say_text
from kvwire.errors import KvwireError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.engines.base import Engine


_MODEL, _TOWN = "demo/model", "demo/town"
_BOUND = 0.06
"""Twice what loads accept (``LoadSettings.max_kl``): predicted divergence is within a factor of two of the measured."""


@dataclass(frozen=True)
class _DemoOptions:
    """What ``kvwire demo`` is given."""

    model: str = option(default=_MODEL, envvar="KVWIRE_MODEL")
    documents: str | None = option(
        "Folder of .txt or .md files; default: demo/town for chat models, demo/documents for others."
    )
    questions: str | None = option(
        "JSON list of {documents, question, answer}; default: questions.json in the documents' folder or beside it."
    )
    out: str = option("Where demo.json and the picture go.", default="demo/out")
    links: tuple[str, ...] = option("name=50mbit,20ms; default: slow, middling and fast ones.", "--link")
    bound: float = option("KL divergence from exact caches, of any prompt, that is an error.", default=_BOUND)
    agreement: float = option("Share of equal next tokens below which it is an error.", default=0.9)
    as_json: bool = opt.JSON


@command(_DemoOptions)
def demo(options: _DemoOptions) -> None:
    """Compare text recompute, raw KV and kvwire on your documents and model, over three emulated links."""
    from kvwire.comparison.run import run_demo
    from kvwire.runtime.text_files import read_texts

    advice = "is not a folder; run this in the repository, or name --model and --documents of your own"
    model = options.model
    if model == _MODEL and not Path(model).is_dir():
        raise NotFoundError(f"{model} {advice}")
    engine = open_engine(model)
    documents = options.documents or (_TOWN if _chats(engine) else "demo/documents")
    if not Path(documents).is_dir():
        raise NotFoundError(f"{documents} {advice}")
    report = run_demo(
        engine,
        read_texts([documents]),
        more=read_texts(["demo/documents"]) if documents == _TOWN and Path("demo/documents").is_dir() else {},
        questions=options.questions or _beside(documents),
        out=Path(options.out),
        links=options.links,
        say=lambda text: say_text(text, err=options.as_json),
    )
    error = _difference(report, options.bound, options.agreement)
    finish(report, (), error, as_json=options.as_json)


def _difference(report: Mapping[str, Any], bound: float, agreement: float) -> KvwireError | None:
    """An error where answers differ by more than is allowed."""
    worst = max(kl for link in report["links"] for kl in link["kl_of_each_prompt"])
    least = min(link["greedy_agreement"] for link in report["links"])
    if worst <= bound and least >= agreement:
        return None
    return KvwireError(f"answers differ: KL divergence up to {worst:.4f} nats, {least:.0%} of the next tokens agree")


def _chats(engine: Engine) -> bool:
    """Whether the model has a chat template."""
    from kvwire.types import Chat

    try:
        engine.render_chat(Chat(), "?")
    except KvwireError:
        return False
    return True


def _beside(documents: str) -> str | None:
    folder = Path(documents).resolve()
    found = (path for path in (folder / "questions.json", folder.parent / "questions.json") if path.is_file())
    return next(map(str, found), None)
