"""``kvwire encode`` killed with SIGKILL at random moments, hundreds of times: nothing that it told of is lost.

Into a folder, into an S3 emulator (``--s3``: into another server's prefix, with credentials in the environment) and
through a write-back tier. After each kill ``kvwire store verify`` has to find everything whole, and every document of
which a line was printed has to be in the catalog; after each store ``kvwire ask`` has to answer from the blobs. Writes
``results/kills.json``; ends with 1 where anything is wrong. Needs the ``dev`` packages; linux.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path

os.environ["KVWIRE_ESTIMATES"] = "off"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process with a pool of threads cannot be forked

from fault_parts.kills import Counts, Killer, Place, Source, as_rows, make_model, make_texts, rows_of, use_engine
from fault_parts.servers import ministack
from measure import RESULTS, write_json

PLACES = ("folder", "s3", "write-back")


def places(names: list[str], folder: Path, s3: str | None, stack: ExitStack) -> list[Place]:
    """Where to write; an emulator runs until the stack is left, where one is needed."""
    from kvwire.store import open_store

    out = []
    for name in names:
        if name == "s3":
            server = None if s3 else stack.enter_context(ministack())
            base = s3 or server.address("kills")
            open_store(base).close()  # boto3's descriptions of S3 are read here, once for all processes
            before, _, query = base.partition("?")
            out.append(Place(name, lambda n, b=before, q=query: f"{b}/{n}?{q}"))
        elif name == "write-back":
            out.append(Place(name, lambda n: str(folder / "behind" / str(n)), cache=folder / "tier"))
        else:
            out.append(Place(name, lambda n: str(folder / "store" / str(n))))
    return out


def main() -> int:
    """Kill, look, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in each place")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--s3", help="address of a prefix on another server, instead of the emulator")
    parser.add_argument("--out", type=Path, default=RESULTS / "kills.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")  # of one thread, which is fine
    import torch

    from kvwire.engines.transformers import open_engine

    torch.set_num_threads(1)
    counts: list[Counts] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model, texts = make_model(folder / "model"), make_texts(folder / "texts")
        engine = open_engine(model, dtype=torch.float32)
        source = Source(engine, model, texts, use_engine(engine, texts))
        gc.freeze()  # what is here stays: a child that searched it for garbage would copy all of it
        for place in places(options.places, folder, options.s3, stack):
            counts.append(Killer(place, source, options.seed).run(options.kills))
            print(*rows_of(counts[-1:]), flush=True)
    write_json(options.out, "kills", {"seed": options.seed, "kills": options.kills}, {"places": as_rows(counts)})
    return int(any(each.troubles for each in counts))


if __name__ == "__main__":
    sys.exit(main())
