"""``kvwire vllm-proxy``: stands before vLLM and turns placeholders of documents into what its connector loads."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import model_name
from kvwire.cli.options import StoreOptions, command, flag, option, use_file
from kvwire.cli.serve import logs_on_stderr, until_stopped

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class _ProxyOptions:
    """What ``kvwire vllm-proxy`` is given."""

    upstream: str = option("vLLM's address.", envvar="KVWIRE_UPSTREAM", default="http://127.0.0.1:8000")
    model: str = option(
        "Folder of the model that vLLM serves: its tokenizer and template are read, no weights.",
        required=True, envvar="KVWIRE_MODEL",
    )  # fmt: skip
    host: str = option("Address to bind; others than loopback need --client-token.", default="127.0.0.1")
    port: int = option("0: any free port.", default=8474, type=click.IntRange(0, 65535))
    client_token: str | None = option("Bearer token that clients must send.", envvar="KVWIRE_CLIENT_TOKEN")
    upstream_token: str | None = option(
        "Bearer token for vLLM; by default what clients send.", envvar="KVWIRE_UPSTREAM_TOKEN"
    )
    load: str = option(
        "Of documents that follow one another: all, the first alone, or all whose repaired rows are kept.",
        default="linked", type=click.Choice(["linked", "first", "kept"]),
    )  # fmt: skip
    level: int | None = option("Quality level of all chunks, where a request names none.", type=click.IntRange(0))
    deadline_s: float | None = option("Seconds to load for, likewise.", "--deadline", "deadline_s", type=opt.ABOVE_0)
    objective: str | None = opt.OBJECTIVE
    prefix: bool = flag("Requests without documents load their longest stored prefix.")
    save: bool = flag("With --prefix, have vLLM keep their prompts and answers.")
    outcomes: Path | None = option(
        "Socket for what became of streamed requests; vLLM's setting outcomes names the same.", type=opt.FILE
    )
    combinations: str | None = option(
        "Count linked documents here; kvwire repair repairs those that are linked often, and they are loaded so.",
        metavar="FILE",
    )
    max_body_bytes: int = option("Largest request body.", default=32 << 20, type=click.IntRange(1))
    max_requests: int = option("Most requests answered at once.", default=512, type=click.IntRange(1))
    answer_seconds: float = option("Longest silence of vLLM, in seconds.", default=600.0, type=opt.ABOVE_0)
    shutdown_seconds: float = option(
        "Seconds for running answers after SIGTERM.", default=30.0, type=click.FloatRange(0)
    )
    log_level: str = opt.LOG_LEVEL
    log_format: str = opt.LOG_FORMAT
    place: StoreOptions = opt.STORE
    as_json: bool = opt.JSON


@command(_ProxyOptions, "vllm-proxy")
def vllm_proxy(options: _ProxyOptions) -> None:
    """Stand before vLLM: placeholders {{kvwire:ID}} in OpenAI's requests become documents that its connector loads."""
    from kvwire.engines.transformers.opening import open_tokenizer
    from kvwire.runtime.corpus import Corpus
    from kvwire.vllm import BodyMaker, ProxySettings, VllmProxy, Wanted

    wanted = Wanted(
        options.level, options.deadline_s, options.objective, options.load, options.prefix, options.save  # type: ignore[arg-type]
    )  # fmt: skip
    settings = ProxySettings(
        upstream=options.upstream, upstream_token=options.upstream_token or "", token=options.client_token or "",
        outcomes=options.outcomes and options.outcomes.absolute(), max_body_bytes=options.max_body_bytes,
        max_requests=options.max_requests, answer_s=options.answer_seconds, shutdown_s=options.shutdown_seconds,
    )  # fmt: skip
    with (
        logs_on_stderr(options.log_level, options.log_format),
        options.place.opened() as store,
    ):
        corpus = Corpus.open(store, model=model_name(options.model), **options.place.whose())
        maker = BodyMaker(corpus, open_tokenizer(options.model), wanted, use_file(options.combinations))
        listening = VllmProxy(maker, settings).listen(options.host, options.port)
        asyncio.run(until_stopped(listening, f"before {options.upstream}", as_json=options.as_json))
