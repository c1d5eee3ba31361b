"""A store of 10^9 documents on paper: requests, listings, memory, money; each figure from a count that is made here.

    python benchmarks/store_scale.py

What one document costs is counted on small stores: objects, bytes, and requests of encoding, loading, collecting and
checking, at two sizes, so that what grows with the store shows. The rest is multiplication. Seconds and bytes of memory
for each object are those of ``results/many_objects.json``. Prices and limits are a cloud's published ones: see --help.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from measure import RESULTS, write_json
from test_parts.store_wrappers import Request, StoreWrapper

import kvwire
from kvwire.store import Catalog, MemoryStore, collect, verify_store
from kvwire.types import CacheMeta, KVCache, LayerSpec, RopeRegime, digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvwire.store.base import Data

CONFIG = "c" * 64
_DIM = 128
PAGE = 1000
"""Keys in an answer to a listing, of S3."""
PREFIX_READS, PREFIX_WRITES = 5500, 3500
"""Requests a second that S3 promises for each prefix; keys lie below 256 of them, two digits of a digest."""
PREFIXES = 256
MONTH_S = 30 * 24 * 3600
PRICES = {  # dollars: a GB and month, 1,000 writes or listings, 1,000 reads; within the region, bytes out are free
    "us-east-1": (0.023, 0.005, 0.0004),
    "eu-central-1": (0.0245, 0.0054, 0.00043),
    "ap-northeast-1": (0.025, 0.0047, 0.00037),
    "sa-east-1": (0.0405, 0.007, 0.00056),
}


class _Counting(StoreWrapper):
    """Counts calls; a listing counts as the pages that it would take."""

    is_local = False

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.calls: Counter[str] = Counter()

    def _do(self, request: Request, call: Callable[[Data], Any]) -> Any:  # noqa: ANN401 - of any call
        result = call(request.data)
        if request.method == "scan":
            found = list(result)
            self.calls["list"] += 1 + len(found) // PAGE
            return iter(found)
        writes = request.method in ("put", "create", "delete")
        self.calls["write" if writes else "read"] += 1
        self.calls["entry"] += writes and "/catalog/" in request.key
        return result


@dataclass(frozen=True)
class Counts:
    """What one document costs, and what a store costs as a whole, in requests."""

    objects: float
    entry_bytes: float
    encode_writes: float
    entry_writes: float
    encode_reads: float
    encode_lists: float
    collect_reads: float
    collect_lists_per_object: float
    verify_reads: float


def counted(documents: int, blob_bytes: int) -> Counts:
    """Make a store of so many documents, and count."""
    store, rng = _Counting(), random.Random(1)
    catalog = Catalog(store)
    for number in range(documents):
        ids = [rng.randrange(32000) for _ in range(50)]
        catalog.texts.put(CONFIG, ids, document_id=f"d{number}")
        entry = catalog.put_blob(
            CONFIG, rng.randbytes(blob_bytes), document_id=f"d{number}", header_bytes=64, tokens=1000,
            token_digest=digest_tokens(ids), profile_digest="a" * 64,
            levels=[(name, 64) for name in ("coarse", "standard", "fine", "finer", "finest")],
        )  # fmt: skip
        catalog.confirm(CONFIG, entry, ids)
    encode, store.calls = dict(store.calls), Counter()
    objects = len(list(store.inner.keys("")))
    collect(store, dry_run=True)
    gc, store.calls = dict(store.calls), Counter()
    verify_store(store, [catalog], jobs=1)
    verify = dict(store.calls)
    return Counts(
        objects / documents, len(entry.to_json()), encode["write"] / documents, encode["entry"] / documents,
        encode.get("read", 0) / documents,
        encode["list"] / documents, gc["read"] / documents, gc["list"] / objects, verify["read"] / documents,
    )  # fmt: skip


def on_paper(counts: Counts, args: argparse.Namespace, laws: dict[str, Any]) -> dict[str, Any]:
    """Figures of the whole store."""
    documents, objects = args.documents, args.documents * counts.objects
    gigabytes = documents * (args.tokens * args.token_bytes + 2 * counts.entry_bytes) / 1e9
    loads_s = args.gpus * args.loads
    reads_s = loads_s * args.documents_a_load * args.reads_a_document
    new_s = documents * args.churn / MONTH_S
    writes = new_s * counts.encode_writes * MONTH_S
    lists = new_s * counts.encode_lists * MONTH_S + counts.collect_lists_per_object * objects * args.collections
    reads = reads_s * MONTH_S + documents * counts.collect_reads * args.collections
    money = {
        region: {"storage": gigabytes * gb, "writes": (writes + lists) / 1000 * put, "reads": reads / 1000 * get}
        for region, (gb, put, get) in PRICES.items()
    }
    return {
        "objects": objects, "stored_gigabytes": gigabytes, "listing_pages": objects / PAGE,
        "listing_days_in_one_stream": objects / PAGE * args.page_s / 86400,
        "loads_per_s": loads_s, "reads_per_s": reads_s, "reads_per_s_allowed": PREFIXES * PREFIX_READS,
        "gigabytes_per_s": loads_s * args.documents_a_load * args.tokens * args.load_token_bytes / 1e9,
        "new_documents_per_s": new_s, "catalog_writes_per_s_allowed": PREFIXES * PREFIX_WRITES,
        "collect_days": documents * counts.collect_reads * args.read_s / args.read_ahead / 86400,
        "collect_gigabytes_of_memory": objects * laws["gc --dry-run"]["growth_bytes_per_object"] / 1e9,
        "collect_days_on_a_local_disk": objects * laws["gc --dry-run"]["us_per_object"] / 1e6 / 86400,
        "verify_days_of_reading_at_1_gigabyte_per_s": gigabytes / 86400,
        "verify_gigabytes_of_memory": objects * laws["verify"]["growth_bytes_per_object"] / 1e9,
        "dollars_a_month": {region: parts | {"sum": sum(parts.values())} for region, parts in money.items()},
    }  # fmt: skip


def tiny(counts: Counts, args: argparse.Namespace) -> dict[str, Any]:
    """Short documents, each in objects of its own, and so many of them in one blob and one text.

    Entries stay: a document is found by its name. So packing saves the writes of content, and the looks at what is
    being collected, of which a pack needs one. Loads of documents that do not lie beside each other save nothing.
    """
    documents, (gb_month, put, get), entry_writes = args.tiny_documents, PRICES["us-east-1"], counts.entry_writes
    content_writes = counts.encode_writes - entry_writes
    gigabytes = {
        name: documents * (args.tiny_tokens * token_bytes + 2 * counts.entry_bytes) / 1e9
        for name, token_bytes in (("five levels", args.token_bytes), ("three levels", args.three_token_bytes))
    }
    found: dict[str, Any] = {"entry_writes": entry_writes, "content_writes": content_writes}
    for pack in (1, *args.packs):
        writes = entry_writes + content_writes / pack
        lists = counts.encode_lists / pack
        dollars = documents * ((writes + lists) * put + counts.encode_reads * get) / 1000
        found[f"{pack} in one"] = {
            "objects": documents * (2 + (counts.objects - 2) / pack), "writes": documents * writes,
            "listings": documents * lists, "dollars_once": dollars,
            "months_of_storage": {name: dollars / (size * gb_month) for name, size in gigabytes.items()},
        }  # fmt: skip
    most = found["1 in one"]["dollars_once"] - found[f"{args.packs[-1]} in one"]["dollars_once"]
    # What is replaced stays until a whole pack is: a share of the bytes that is dead costs so much for so long.
    saved = {name: most / (size * gb_month) for name, size in gigabytes.items()}
    return found | {"gigabytes": gigabytes, "saved_once_in_months_of_storage": saved}


def headers() -> dict[str, Any]:
    """Bytes of a blob before its segments, over tokens: with a profile, small shape, and without one, 8B shape.

    What caches hold does not matter for that: they are random.
    """
    generator = torch.Generator().manual_seed(0)

    def cache(layers: int, heads: int, tokens: int) -> KVCache:
        rope = RopeRegime(tuple(10000.0 ** (-2 * pair / _DIM) for pair in range(_DIM // 2)))
        meta = CacheMeta("model", "1" * 64, "", "float32", (LayerSpec(heads, _DIM, _DIM, rope=0),) * layers, (rope,))
        scale = torch.linspace(0.1, 3, _DIM)
        keys, values = (
            [torch.randn(heads, tokens, _DIM, generator=generator) * scale for _ in range(layers)] for _ in range(2)
        )
        return KVCache.from_tensors(keys, values, meta, torch.randint(0, 8000, (tokens,), generator=generator).tolist())

    profile = kvwire.fit_profile([cache(6, 2, 300) for _ in range(4)])
    found = {tokens: kvwire.inspect(kvwire.encode(cache(6, 2, tokens), profile)).header_bytes for tokens in (200, 2048)}
    alone = kvwire.inspect(kvwire.encode(cache(32, 8, 200))).header_bytes
    return {
        "with a profile": found, "bytes_a_token": (found[2048] - found[200]) / (2048 - 200),
        "200 tokens of the 8B shape without one": alone,
    }  # fmt: skip


def _laws(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    largest: dict[str, Any] = results[max(results, key=int)]
    return largest


def main() -> None:
    """Count, multiply, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=float, default=1e9)
    parser.add_argument("--tokens", type=float, default=1000)
    parser.add_argument("--token-bytes", type=float, default=17400.0, help="stored: 2.12 bits of 65,536 numbers")
    parser.add_argument("--load-token-bytes", type=float, default=1700.0, help="fetched: 0.21 bits")
    parser.add_argument("--gpus", type=float, default=1000)
    parser.add_argument("--loads", type=float, default=1.0, help="of each GPU, a second")
    parser.add_argument("--documents-a-load", type=float, default=4.0)
    parser.add_argument("--reads-a-document", type=float, default=6.0, help="entry, header, four chunks")
    parser.add_argument("--churn", type=float, default=0.1, help="share of documents that is new each month")
    parser.add_argument("--collections", type=float, default=1.0, help="a month")
    parser.add_argument("--read-s", type=float, default=0.02)
    parser.add_argument("--read-ahead", type=float, default=8.0, help="reads that a collector has under way")
    parser.add_argument("--page-s", type=float, default=0.1)
    parser.add_argument("--tiny-documents", type=float, default=1e6)
    parser.add_argument("--tiny-tokens", type=float, default=200)
    parser.add_argument("--three-token-bytes", type=float, default=4500.0, help="stored with three levels: 0.55 bits")
    parser.add_argument("--packs", type=int, nargs="+", default=[10, 100, 1000], help="documents in one object")
    parser.add_argument("--out", default=RESULTS / "store_scale.json")
    args = parser.parse_args()
    small, large = counted(200, 500), counted(2000, 500)
    more = large.objects * 2000 - small.objects * 200
    pages = large.collect_lists_per_object * large.objects * 2000 - small.collect_lists_per_object * small.objects * 200
    laws = _laws(RESULTS / "many_objects.json")
    results = {
        "tiny": tiny(large, args) | {"header_bytes": headers()},
        "200 documents": asdict(small),
        "2000 documents": asdict(large),
        "paper": on_paper(replace(large, collect_lists_per_object=pages / more), args, laws),
    }
    print(json.dumps(results, indent=1, default=str))
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write_json(args.out, "store_scale", settings, results)


if __name__ == "__main__":
    main()
