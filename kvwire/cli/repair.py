"""``kvwire repair``: the worker beside vLLM that computes rows of documents that are linked again and again."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import closing
from dataclasses import asdict, dataclass

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import open_engine
from kvwire.cli.options import StoreOptions, command, option, use_file
from kvwire.cli.say import say
from kvwire.errors import ArgumentError


@dataclass(frozen=True)
class _RepairOptions:
    """What ``kvwire repair`` is given."""

    combinations: str = option("File in which kvwire vllm-proxy counts what it links.", required=True, metavar="FILE")
    model: str = opt.MODEL
    device: str = opt.DEVICE
    dtype: str = opt.DTYPE
    after: int = option("Uses from which on documents are repaired.", default=2, type=click.IntRange(1))
    kept_size: str = option("Of all rows that are kept; older ones give way.", default="10GB")
    watch: float | None = option("Go on until interrupted, and look every so many seconds.", type=opt.ABOVE_0)
    place: StoreOptions = opt.STORE
    as_json: bool = opt.JSON


@command(_RepairOptions)
def repair(options: _RepairOptions) -> None:
    """Compute and keep the rows of documents that kvwire vllm-proxy linked often, so that later links are right."""
    from kvwire.runtime.combinations import CombinationRepairer
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import parse_size

    most = parse_size(options.kept_size)
    counts = use_file(options.combinations)
    if counts is None:
        raise ArgumentError("--combinations names no file")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    engine = open_engine(options.model, options.device, options.dtype)
    with closing(counts), options.place.opened() as store:
        repairer = CombinationRepairer(Corpus(engine, store, **options.place.whose()), engine, most)
        while not stop.is_set():
            for done in repairer.repair_due(counts, options.after):
                words = f"{done.rows} rows of {' '.join(done.documents)}" if done.rows else done.trouble
                say(json.dumps(asdict(done)) if options.as_json else words)
                if stop.is_set():
                    break
            if options.watch is None:
                break
            stop.wait(options.watch)
