"""``kvwire encode`` killed at any moment: what it told of is there and whole, and the next run goes on.

The command line runs in processes forked from this one, which has imported everything and opened the model: a start
takes a moment then, and hundreds of kills minutes. Nothing else of the command is replaced.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.engines.base import Engine

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = 8
_LINE = re.compile(r"(\S+): \d+ tokens")
_LONGEST_S = 120.0
"""For a command that nobody kills."""


def make_model(folder: Path) -> Path:
    """A model with the demonstration's tokenizer, small enough to calibrate in a second."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, initializer_range=0.15,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "demo" / "model" / name, folder / name)
    return folder


def make_texts(folder: Path, count: int = DOCUMENTS) -> Path:
    """So many short documents, pieces of the demonstration's."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "demo" / "documents").glob("*.txt")))
    folder.mkdir()
    for number in range(count):
        (folder / f"d{number}.txt").write_text(text[number * 700 : number * 700 + 350], encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Ended:
    """A command that ended, or was killed. code: negative, the signal."""

    code: int
    out: str
    seconds: float


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after so many lines were printed."""

    lines: int
    seconds: float


def forked(work: Callable[[], object], kill_at: Moment | None = None) -> Ended:
    """Run work in a process of its own, which is killed where a moment is given."""
    read, write = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if not child:
        os.close(read)
        _run(work, write)
    os.close(write)
    out, wait, limit = b"", kill_at, started + _LONGEST_S
    while True:
        if wait is not None and out.count(b"\n") >= wait.lines:
            wait, limit = None, time.monotonic() + wait.seconds
        if not select.select([read], [], [], max(0.0, limit - time.monotonic()))[0]:
            break
        if not (piece := os.read(read, 1 << 16)):
            limit = 0.0
            break
        out += piece
    if limit:
        if kill_at is None:  # it hangs: faulthandler, where that is on, tells where
            os.kill(child, signal.SIGABRT)
            time.sleep(1)
        os.kill(child, signal.SIGKILL)
        while piece := os.read(read, 1 << 16):  # what it had said by then
            out += piece
    os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(code, out.decode(errors="replace"), time.monotonic() - started)


def _run(work: Callable[[], object], write: int) -> NoReturn:
    """The child's life: stdout goes to the pipe, stderr to where this process has it."""
    code = 0
    tqdm.set_lock(threading.RLock())  # its usual one is shared by all processes: one that was killed would hold it on
    try:
        os.dup2(write, 1)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - it must not go on as a second parent
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    os._exit(code)


def kvwire(*words: object) -> Callable[[], object]:
    """The command line, to be forked."""

    def run() -> None:
        from kvwire.cli.app import main

        sys.argv = ["kvwire", *map(str, words)]
        main()

    return run


def documents_of(engine: Engine, texts: Path) -> list[Any]:
    """What ``kvwire encode`` makes of a folder."""
    from kvwire.runtime.corpus import Document
    from kvwire.runtime.text_files import read_texts

    return [Document(name, tuple(engine.tokenize(text))) for name, text in read_texts([str(texts)]).items()]


def use_engine(engine: Engine, texts: Path) -> float:
    """Have commands of this process's children find the model open, and kernels and modules loaded.

    Returns:
        Seconds that encoding the texts takes from then on.
    """
    import kvwire.cli.ask
    import kvwire.cli.encode
    import kvwire.cli.store
    from kvwire.codec import decode
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.loader import Loader  # noqa: F401 - see above
    from kvwire.store import MemoryStore, S3Store, open_tiers, verify_store  # noqa: F401 - see above

    seconds = 0.0
    for _ in range(2):  # the first time kernels are loaded
        started, corpus = time.monotonic(), Corpus(engine, MemoryStore())
        for encoded in corpus.encode(documents_of(engine, texts)):
            decode(corpus.catalog.store.get(encoded.entry.blob_key), profile=corpus.profile(), threads=1)
        seconds = time.monotonic() - started

    def opened(*_: object) -> Engine:
        return engine

    kvwire.cli.ask.open_engine = kvwire.cli.encode.open_engine = opened
    return seconds


@dataclass
class Place:
    """Where documents are written: an address, and what else the command line is told.

    Attributes:
        name: In results.
        address: Of a new store, by a number.
        options: For all commands.
        cache: Folder of a write-back tier; documents are then written by the library, which the command line has not.
    """

    name: str
    address: Callable[[int], str]
    options: tuple[object, ...] = ()
    cache: Path | None = None


@dataclass
class Counts:
    """What came of it."""

    place: str
    kills: int = 0
    whole_runs: int = 0
    stores: int = 0
    told: int = 0
    asks: int = 0
    seconds: float = 0.0
    troubles: list[str] = field(default_factory=list)


class Source(NamedTuple):
    """What is encoded, with which model, and the seconds that it takes."""

    engine: Engine
    model: Path
    texts: Path
    seconds: float


class Killer:
    """Kills writers of one place again and again, and looks at what they leave."""

    def __init__(self, place: Place, source: Source, seed: int) -> None:
        """Nothing is written yet."""
        self.place, self.engine, self.model, self.texts, self.whole_s = place, *source
        self.random, self.counts = random.Random(seed), Counts(place.name)
        self.number = 0

    def run(self, kills: int) -> Counts:
        """Until so many writers were killed, or something is wrong."""
        started = time.monotonic()
        while self.counts.kills < kills and not self.counts.troubles:
            self.one_store(kills)
        self.counts.seconds = round(time.monotonic() - started, 1)
        return self.counts

    def one_store(self, kills: int) -> None:
        """A new store, until a run gets through."""
        self.number += 1
        self.counts.stores += 1
        told: set[str] = set()
        force = self.random.random() < 0.3
        for _ in range(50):
            done = forked(self.write(force=force), self.moment())
            told |= set(_LINE.findall(done.out))
            self.counts.kills += done.code == -signal.SIGKILL
            self.counts.whole_runs += done.code == 0
            if done.code not in {0, -signal.SIGKILL}:
                self.counts.troubles.append(f"a writer ended with {done.code}")
            self.look(told)
            if done.code == 0 or self.counts.troubles or self.counts.kills >= kills:
                break
        self.counts.told += len(told)
        if told and not self.counts.troubles:
            self.ask(sorted(told))

    def moment(self) -> Moment:
        """Of the whole run, or soon after a document was told of: fitting a profile takes most of the time."""
        if self.random.random() < 0.3:
            return Moment(0, self.random.uniform(0, self.whole_s))
        return Moment(self.random.randrange(DOCUMENTS), self.random.uniform(0, self.whole_s / DOCUMENTS))

    @property
    def store(self) -> tuple[object, ...]:
        """Options that name the store under way."""
        return ("--store", self.place.address(self.number), *self.place.options)

    def write(self, *, force: bool) -> Callable[[], object]:
        """Encode all documents."""
        if self.place.cache is None:
            return kvwire("encode", self.texts, "--model", self.model, *self.store, *(["--force"] if force else []))
        return lambda: write_back(self.engine, self.texts, self.tiers(), force=force)

    def tiers(self) -> Callable[[], Any]:
        """Opens the write-back tier of the store under way."""
        from kvwire.store import open_store, open_tiers

        folder = self.place.cache / str(self.number) if self.place.cache else None

        def opened() -> Any:  # noqa: ANN401 - a tiered store
            remote = open_store(self.place.address(self.number))
            return open_tiers(remote, memory_bytes=0, folder=folder, folder_bytes=1 << 28, write_back=True)

        return opened

    def ended(self, work: Callable[[], object]) -> Ended:
        """A command that nobody kills and that has to succeed."""
        done = forked(work)
        if done.code:
            self.counts.troubles.append(f"a command ended with {done.code}: {done.out[-400:]}")
        return done

    def look(self, told: set[str]) -> None:
        """Everything that is there is whole, and everything that was told of is there."""
        if self.place.cache is not None:
            self.ended(lambda: settle(self.tiers()))
        address = self.place.address(self.number)
        if "://" not in address and not Path(address).is_dir():  # killed before anything was written
            listed = set()
        else:
            self.ended(kvwire("store", "verify", *self.store, "--json"))
            rows = self.ended(kvwire("store", "ls", *self.store, "--json")).out.splitlines()
            listed = {json.loads(row)["id"] for row in rows if row.startswith("{")}
        if told - listed:
            self.counts.troubles.append(f"told of and missing: {sorted(told - listed)}")

    def ask(self, names: list[str]) -> None:
        """A question over what was told of is answered from the blobs."""
        docs = [word for name in names[:3] for word in ("--docs", name)]
        question = ("--question", "It was", "--tokens", 2, "--model", self.model)
        done = self.ended(kvwire("ask", *docs, *question, *self.store, "--json"))
        self.counts.asks += 1
        misses = [] if done.code else json.loads(done.out)["misses"]
        lost = [miss for miss in misses if "given up" not in miss]  # that is the plan's choice on a busy machine
        if lost:
            self.counts.troubles.append(f"asked, and missed: {lost}")


def write_back(engine: Engine, texts: Path, tiers: Callable[[], Any], *, force: bool) -> None:
    """What ``kvwire encode`` does, through a tier that answers once a write is safe on the local disk."""
    from kvwire.cli.encode import print_row
    from kvwire.offline.manifest import Row
    from kvwire.offline.steps import stored_row
    from kvwire.runtime.corpus import Corpus

    with closing(tiers()) as store:
        for encoded in Corpus(engine, store).encode(documents_of(engine, texts), force=force):
            print_row(stored_row(Row(encoded.entry.document_id, ""), encoded))


def settle(tiers: Callable[[], Any]) -> None:
    """What a killed writer left in its tier goes to the store."""
    with closing(tiers()) as store:
        store.flush(_LONGEST_S)


def rows_of(counts: list[Counts]) -> Iterator[str]:
    """A line for each place."""
    for each in counts:
        yield (
            f"{each.place}: {each.kills} kills and {each.whole_runs} whole runs into {each.stores} stores in "
            f"{each.seconds:.0f} s; {each.told} documents told of, {each.asks} questions; "
            f"{each.troubles or 'all whole'}"
        )


def as_rows(counts: list[Counts]) -> list[dict[str, Any]]:
    """For results."""
    return [asdict(each) for each in counts]
