"""A document of 131,072 tokens: encoded, fetched and linked, and the memory that each takes.

The model is a copy of a small one whose window is made longer in its configuration: it then computes numbers far beyond
the positions it was trained on, which memory does not mind. Two processes of their own:

* ``encode`` fits the profile, encodes a short document, which compiles the kernels, then the long one.
* ``load`` asks over the short one, then over both, linked, from the server of ``kvwire serve``: as shipped
  (``earliest``), and with every chunk at the finest level, which is the most that decoding may have to hold.

Memory is the growth of the peak resident set (proc(5)) over what was resident before, what is returned included, and
stands beside the bytes of the long document's cache. The loaded cache is compared with the prefilled one at pieces of
it: the error that the blob's level claims must be the error found.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from decode_memory import _RESET_PEAK, _resident_bytes
from measure import SHARED, add_common_options, calibration, table, windows, write_json

import kvwire
from kvwire.controller.policies.fixed import Fixed
from kvwire.runtime.settings import LoadSettings
from kvwire.transport.testing import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire import KVCache, TransformersEngine

SHORT, FITTED = 1024, 24
"""Tokens of the short document and of each text that the profile is fitted on, and how many of these."""
PIECES, PIECE = 16, 64
"""Stretches of the long document that are compared, and the tokens of each."""
MEGABYTE = 1e6


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``work`` returns, the growth of the peak while it ran, and its seconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    before, started = _resident_bytes("VmRSS"), time.monotonic()
    result = work()
    return result, {"growth_bytes": _resident_bytes("VmHWM") - before, "seconds": time.monotonic() - started}


def pieces(cache: KVCache, tokens: int, first: int = 0) -> list[torch.Tensor]:
    """Values, which have no positions, of stretches spread over the last ``tokens`` tokens from ``first`` on."""
    starts = [first + number * (tokens - PIECE) // (PIECES - 1) for number in range(PIECES)]
    return [torch.stack([values[:, at : at + PIECE].float().cpu() for values in cache.values]) for at in starts]


def encode(folder: Path, ids: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
    """Child: encode the short document, then the long one; print the memory of the second."""
    engine = kvwire.open_engine(folder / "model", dtype=torch.float32)
    prefill, kept = engine.prefill, []
    took: dict[str, float] = {}

    def recorded(documents: Sequence[Sequence[int]], **options: Any) -> list[KVCache]:  # noqa: ANN401
        started = time.monotonic()
        caches = prefill(documents, **options)
        took["prefill_s"] = time.monotonic() - started
        if len(documents[0]) == len(ids):
            took["cache_bytes"], took["prefill_peak_bytes"] = caches[0].nbytes, _resident_bytes("VmHWM")
            kept.extend(pieces(caches[0], len(ids)))
        return caches

    engine.prefill = recorded  # type: ignore[method-assign]
    corpus = kvwire.Corpus(engine, kvwire.open_store(f"file://{folder / 'store'}"))
    corpus.calibrate([kvwire.Document(str(number), tuple(text)) for number, text in enumerate(texts)])
    list(corpus.encode([kvwire.Document("short", tuple(ids[:SHORT]))]))
    resident = _resident_bytes("VmRSS")
    (encoded,), found = measured(lambda: list(corpus.encode([kvwire.Document("long", tuple(ids))])))
    torch.save(kept, folder / "pieces.pt")
    found |= took | {"prefill_growth_bytes": took.pop("prefill_peak_bytes") - resident}
    found["blob_bytes"] = encoded.info.file_bytes
    print(json.dumps(found))


def load(folder: Path, url: str, tokens: int) -> None:
    """Child: ask over the short document, then over both; print the memory of the second."""
    engine = kvwire.open_engine(folder / "model", dtype=torch.float32)
    corpus = kvwire.Corpus(engine, kvwire.open_store(url))
    exact, question = torch.load(folder / "pieces.pt", weights_only=True), engine.tokenize("Once upon a time")
    found: dict[str, Any] = {}
    finest = len(corpus.read_header(corpus.find("long")).levels) - 1
    for name, policy in (("as shipped", None), ("finest level", Fixed(finest))):
        with kvwire.Loader(engine, corpus, settings=LoadSettings(policy=policy)) as loader:
            loader.ask(["short"], question)
            answer, memory = measured(lambda: loader.ask(["short", "long"], question))
            decided = {decision.level for decision in answer.decisions if decision.level is not None}
            cache = answer.prompt.cache
            errors = [_error(a, b) for a, b in zip(pieces(cache, tokens, SHORT), exact, strict=True)]
            found[name] = memory | {
                "ttft_s": answer.timing.ttft_s,
                "fetched_bytes": answer.bytes,
                "levels": sorted(decided),
                "chunks_from_text": sum(decision.level is None for decision in answer.decisions),
                "cache_bytes": cache.nbytes,
                "finite": bool(torch.isfinite(answer.logits).all()),
                "values_error": [min(errors), max(errors)],
            }
            del answer, cache
    print(json.dumps(found))


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def in_a_process(*words: str) -> dict[str, Any]:
    """Run this file's child and return what it prints last."""
    run = subprocess.run([sys.executable, __file__, "--child", *words], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def longer(model: Path, target: Path, window: int) -> TransformersEngine:
    """Copy a model with a longer window, and open it."""
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = window
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return kvwire.open_engine(target, dtype=torch.float32)


def main() -> None:
    """Encode, serve, load, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "long_document")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of the document")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.set_defaults(model=SHARED / "models" / "stories260K")
    args = parser.parse_args()
    if args.child:
        folder = Path(args.child[1])
        ids, texts = json.loads((folder / "ids.json").read_text(encoding="ascii"))
        if args.child[0] == "encode":
            encode(folder, ids, texts)
        else:
            load(folder, args.child[2], len(ids))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = longer(args.model, folder / "model", 2 * args.tokens)
        largest = max(args.fit, key=lambda path: path.stat().st_size)
        (ids,) = windows(engine, largest, 1, args.tokens, args.seed)
        texts = calibration(engine, args.fit, FITTED, SHORT, args.seed)
        (folder / "ids.json").write_text(json.dumps([ids, texts]), encoding="ascii")
        encoded = in_a_process("encode", name)
        with serving(kvwire.open_store(f"file://{folder / 'store'}")) as url:
            loaded = in_a_process("load", name, url)
    print_results(encoded, loaded)
    settings = {"model": args.model.resolve().name, "text": largest.name, "tokens": args.tokens, "seed": args.seed}
    write_json(args.out, "long_document", settings, {"encode": encoded, "load": loaded})


def print_results(encoded: dict[str, Any], loaded: dict[str, Any]) -> None:
    """One table."""
    cache = encoded["cache_bytes"]
    rows = [["prefill alone", encoded["prefill_growth_bytes"], encoded["prefill_s"]]]
    rows += [["prefill and encode", encoded["growth_bytes"], encoded["seconds"]]]
    rows += [[f"load, {name}", found["growth_bytes"], found["seconds"]] for name, found in loaded.items()]
    shown = [[what, f"{grown / MEGABYTE:.0f}", f"{grown / cache:.2f}", f"{s:.1f}"] for what, grown, s in rows]
    print(f"the document's cache: {cache / MEGABYTE:.0f} MB")
    print(table(["", "peak growth, MB", "over the cache", "seconds"], shown))


if __name__ == "__main__":
    main()
