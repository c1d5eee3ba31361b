"""What the time of an answer tells: of a token that is guessed, and of content that another tenant or writer has.

Tokens: the server's decision, called directly, on guesses that share nothing with a token or all but its last two
characters. Content: a real server over loopback with two tenants; one uploads and asks for what the other has, and for
what nobody has. Donors: searches for prompts like one that another tenant, or another writer of the same tenant, has
kept, and like none; one of the own tenant's shows what would be seen. Cases are drawn in random order, one call at a
time. One case is there twice, so that the difference of equal cases shows the noise. The mean is over the fastest nine
tenths.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import http.client
import json
import random
import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from measure import RESULTS, table, write_json

from kvwire.store import Catalog, DonorIndex, FolderStore, tenant_hash
from kvwire.transport import AccessSettings, new_token
from kvwire.transport.server.access import Access
from kvwire.transport.server.exchange import RefusedError
from kvwire.transport.testing import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_KEPT = 0.9
_SIGMAS = 4
"""Differences of so many standard errors are more than noise."""
_GUESSES = 256
_BLOB_BYTES = 20_000
_PROMPT = 400
_CONFIG = "c0" * 32


def spread(samples: Sequence[int]) -> tuple[float, float]:
    """Mean of the fastest nine tenths, and its standard error (Yuen: by the winsorised deviation), in nanoseconds."""
    kept = sorted(samples)[: int(_KEPT * len(samples))]
    winsorised = kept + [kept[-1]] * (len(samples) - len(kept))
    return statistics.fmean(kept), statistics.stdev(winsorised) / (_KEPT * len(samples) ** 0.5)


def drawn(cases: dict[str, Callable[[], object]], tries: int, seed: int) -> dict[str, list[int]]:
    """Nanoseconds of each call; every case comes ``tries`` times, all in random order."""
    order = [name for name in cases for _ in range(tries)]
    random.Random(seed).shuffle(order)
    for case in cases.values():
        case()
    found: dict[str, list[int]] = {name: [] for name in cases}
    gc.disable()
    for name in order:
        case = cases[name]
        start = time.perf_counter_ns()
        case()
        found[name].append(time.perf_counter_ns() - start)
    gc.enable()
    return found


def compared(samples: dict[str, list[int]], pairs: Sequence[tuple[str, str]]) -> list[dict[str, object]]:
    """Differences of pairs of cases, with what noise would allow."""
    rows: list[dict[str, object]] = []
    for one, other in pairs:
        (first, first_error), (second, second_error) = spread(samples[one]), spread(samples[other])
        error = (first_error**2 + second_error**2) ** 0.5
        rows.append({
            "cases": [one, other], "n": len(samples[one]), "means_ns": [first, second], "difference_ns": second - first,
            "standard_error_ns": error, "within_noise": abs(second - first) <= _SIGMAS * error,
        })  # fmt: skip
    return rows


def tokens(folder: Path, tries: int, seed: int) -> list[dict[str, object]]:
    """Guesses of the full token and of a tenant's."""
    full, (tenant, digest) = new_token()[0], new_token()
    others = [{"tenant": f"t{number}", "token_sha256": new_token()[1]} for number in range(100)]
    path = folder / "tenants.json"
    path.write_text(json.dumps([*others, {"tenant": "anna", "token_sha256": digest}]))
    access = Access(AccessSettings(full, path))

    def guesses(start: str) -> Iterator[dict[str, str]]:
        """Headers with tokens that begin so and go on at random; many, since where one lies in memory counts, too."""
        made = [start + new_token()[0][len(start) :] for _ in range(_GUESSES)]
        return cycle([{"Authorization": f"Bearer {token}"} for token in made])

    def ask(headers: Mapping[str, str]) -> None:
        with contextlib.suppress(RefusedError):
            access.rights("GET", "/k", "", headers, "address")

    starts = {"nothing in common": "", "nothing in common, again": "", "the full token but its end": full[:-2],
              "a tenant's token but its end": tenant[:-2]}  # fmt: skip
    cases = {name: lambda rest=guesses(start): ask(next(rest)) for name, start in starts.items()}  # noqa: B008
    return compared(drawn(cases, tries, seed), [("nothing in common", name) for name in list(cases)[1:]])


def content(folder: Path, tries: int, seed: int) -> list[dict[str, object]]:
    """Uploads and look-ups of one tenant, of what the other has and of what nobody has."""
    draw = random.Random(seed)
    made = {name: new_token() for name in ("anna", "berta")}
    path = folder / "tenants.json"
    path.write_text(json.dumps([{"tenant": n, "token_sha256": d, "write": True} for n, (_, d) in made.items()]))
    names = ("new", "new, again", "the other tenant's")
    blobs = {name: [draw.randbytes(_BLOB_BYTES) for _ in range(tries + 1)] for name in names}
    with contextlib.closing(FolderStore(folder / "store")) as store:
        for blob in blobs["the other tenant's"]:
            store.put(_key("berta", blob), blob)
        with serving(store, access=AccessSettings(tenants=path)) as url:
            link = http.client.HTTPConnection(url.rpartition("/")[2], timeout=20)
            headers = {"Authorization": f"Bearer {made['anna'][0]}"}

            def ask(method: str, key: str, body: bytes | None, status: int) -> None:
                link.request(method, f"/{key}", body, headers)
                with link.getresponse() as answer:
                    answer.read()
                    assert answer.status == status

            puts = {name: iter(blobs[name]) for name in names}
            cases = {
                f"PUT, {name}": lambda rest=rest: ask("PUT", _key("anna", blob := next(rest)), blob, 201)
                for name, rest in puts.items()
            }
            gets = {name: iter(blobs[name]) for name in names}
            cases |= {
                f"GET, {name}": lambda rest=rest: ask("GET", _key("berta", next(rest)), None, 404)
                for name, rest in gets.items()
            }
            samples = drawn(cases, tries, seed)
            link.close()
    return compared(samples, [(f"{m}, new", f"{m}, {name}") for m in ("PUT", "GET") for name in names[1:]])


def donors(folder: Path, tries: int, seed: int) -> list[dict[str, object]]:
    """Searches for donors of prompts that differ by a token from one that somebody has kept."""
    draw = random.Random(seed)
    whose = {
        "another tenant's": ("berta", ""),
        "another writer's": ("anna", "mallory"),
        "the own tenant's": ("anna", ""),
    }
    names = ("nobody's", "nobody's, again", *whose)
    prompts = {name: [draw.randrange(50_000) for _ in range(_PROMPT)] for name in names}
    with contextlib.closing(FolderStore(folder)) as store:
        for name, (tenant, writer) in whose.items():
            catalog, ids = Catalog(store, tenant), prompts[name]
            entry = catalog.put_blob(
                _CONFIG, draw.randbytes(_BLOB_BYTES), document_id=name, header_bytes=4, tokens=len(ids),
                token_digest=catalog.texts.put(_CONFIG, ids),
            )  # fmt: skip
            DonorIndex(catalog, _CONFIG, writer).write(entry, ids)
        index = DonorIndex(Catalog(store, "anna"), _CONFIG, "anna")
        cases: dict[str, Callable[[], object]] = {
            name: lambda ids=ids: index.find([*ids[:-1], draw.randrange(50_000)]) for name, ids in prompts.items()
        }
        samples = drawn(cases, tries, seed)
    return compared(samples, [("nobody's", name) for name in names[1:]])


def _key(tenant: str, blob: bytes) -> str:
    digest = hashlib.sha256(blob).hexdigest()
    return f"v1/{tenant_hash(tenant)}/{_CONFIG[:16]}/{digest[:2]}/{digest}.kvw"


def main() -> None:
    """Measure, show, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="tries of each guess")
    parser.add_argument("--requests", type=int, default=2_000, help="tries of each request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "timing_channels.json")
    options = parser.parse_args()
    results = {}
    parts = (
        ("tokens", tokens, options.tokens), ("content", content, options.requests),
        ("donors", donors, options.requests),
    )  # fmt: skip
    for name, measure, tries in parts:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(Path(folder), tries, options.seed)
    head = ("cases", "n", "mean, ns", "difference", "standard error", "within noise")
    rows = [
        [" / ".join(row["cases"]), str(row["n"]), f"{row['means_ns'][0]:.0f}", f"{row['difference_ns']:.1f}",
         f"{row['standard_error_ns']:.1f}", "yes" if row["within_noise"] else "NO"]
        for found in results.values() for row in found
    ]  # fmt: skip
    print(table(head, rows))
    settings = {"seed": options.seed, "tokens": options.tokens, "requests": options.requests}
    write_json(options.out, "timing_channels", settings, results)


if __name__ == "__main__":
    main()
