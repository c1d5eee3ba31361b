"""Entropy coding: kvwire's private-lane rANS against constriction's coders, on the same symbols, one thread.

The symbols are those of a real blob (each segment exactly as the codec codes it: its classes, contexts and lanes) and a
Laplacian of 2.74 bits. Constriction runs in its fastest applicable form: symbols sorted beforehand by the table that
codes them, one prepared ``Categorical`` model and one call for each table, alphabets cut to what the table can code.
Sorting and preparing are not timed, which favours it; "in place" adds what a decoder must still do then, putting the
symbols where they belong. kvwire's figures are those of the calls that the codec makes, in place, checks included.
Nothing is reported before all decoders have returned the same symbols.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from unittest import mock

import constriction
import numpy as np
import torch
from measure import (
    add_common_options,
    calibration,
    default_texts,
    interleaved,
    one_thread,
    ratios,
    summary,
    table,
    windows,
    write_json,
)

import kvwire
from kvwire.codec import Ladder
from kvwire.codec.entropy import rans
from kvwire.codec.entropy.tables import ALPHABET, BIAS, CLASSES, CONTEXTS, fit_tables
from kvwire.codec.format import segment
from kvwire.codec.transform import levels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from numpy.typing import NDArray

    from kvwire import KVCache, Profile

TARGET = 6.0
"""How many times faster than constriction's ANS decoder kvwire's must be."""
LAPLACIAN_BITS = 2.74
CONTEXT_TOKENS = 1024
_CHUNK = (256, 3072)
"""Tokens and columns of the Laplacian's chunk: the whole width of the demonstration's model."""
_ANS, _PLACED, _RANGE = "constriction ANS", "constriction ANS, in place", "constriction range"
_TOTAL = 4096.0


@dataclass(frozen=True)
class Call:
    """One call of the codec to its entropy coder: the function, its arguments and what it returned."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Any

    def repeat(self) -> object:
        """The same call again."""
        return self.function(*self.arguments, **self.named)


@dataclass(frozen=True)
class Group:
    """The symbols of a stream that one table codes, as constriction takes them.

    shares: probabilities of symbols ``first``, ``first + 1``, ...; symbols: int32, counted from ``first``; where: their
    flat indices in the stream's matrix ``[tokens, columns]``.
    """

    shares: NDArray[np.float64]
    first: int
    symbols: NDArray[np.int32]
    where: NDArray[np.int64]

    @cached_property
    def model(self) -> Any:  # noqa: ANN401 - constriction has no types
        """The table as constriction's model."""
        return constriction.stream.model.Categorical(self.shares, perfect=False)


@dataclass(frozen=True)
class Workload:
    """Streams to code: kvwire's calls, and for each of them the groups of its symbols."""

    name: str
    encodes: list[Call]
    decodes: list[Call]
    groups: list[list[Group]]

    @property
    def symbols(self) -> int:
        """Number of symbols in all streams."""
        return sum(call.result.size for call in self.decodes)


def recorded(caller: ModuleType, name: str, work: Callable[[], object]) -> list[Call]:
    """The calls that ``work`` makes from the module ``caller`` to the function ``name`` of the entropy coder."""
    real = getattr(rans, name)
    calls: list[Call] = []

    def spy(*arguments: object, **named: object) -> object:
        result = real(*arguments, **named)
        calls.append(Call(real, arguments, named, result))
        return result

    with mock.patch.object(caller, name, spy):
        work()
    return calls


def workload(name: str, kind: str, cache: KVCache, profile: Profile, ladder: Ladder) -> Workload:
    """Base or ternary streams (``kind``) of one document's blob."""
    blob = kvwire.encode(cache, profile=profile, threads=1, levels=ladder)
    encoder = "encode_base" if kind == "base" else "encode_refinement"
    encodes = recorded(levels, encoder, lambda: kvwire.encode(cache, profile=profile, threads=1, levels=ladder))
    decodes = recorded(segment, f"decode_{kind}", lambda: kvwire.decode(blob, profile=profile, threads=1))
    grouped = _base_groups if kind == "base" else _ternary_groups
    return Workload(name, encodes, decodes, [grouped(call) for call in encodes])


def laplacian(seed: int) -> Workload:
    """Independent symbols of a Laplacian of 2.74 bits in one chunk, through one table fitted to it."""
    values = np.arange(ALPHABET) - BIAS
    low, high = 0.1, 20.0
    for _ in range(60):
        scale = (low + high) / 2
        share = np.exp(-np.abs(values) / scale)
        share[0] = 0
        share /= share.sum()
        used = share[share > 0]
        low, high = (scale, high) if -(used * np.log2(used)).sum() < LAPLACIAN_BITS else (low, scale)
    counts = np.zeros((CLASSES, ALPHABET))
    counts[0] = np.where(share * _TOTAL >= 1, share, 0) * 1e9
    tables = fit_tables(counts, np.zeros((CLASSES, CONTEXTS, 3)))
    drawn = np.random.default_rng(seed).choice(ALPHABET, size=_CHUNK, p=share).astype(np.uint8)
    drawn[tables.base[0][drawn] == 0] = BIAS  # what the table has no slot for would travel as an escape
    classes = np.ones(_CHUNK[1], np.int64)
    arguments = (drawn, classes, tables, rans.lanes_for(drawn.size))
    stream = rans.encode_base(*arguments)
    encode = Call(rans.encode_base, arguments, {}, stream)
    again = (stream, classes, tables, _CHUNK[0])
    decode = Call(rans.decode_base, again, {}, rans.decode_base(*again))
    return Workload(f"Laplacian, {LAPLACIAN_BITS} bits/symbol", [encode], [decode], [_base_groups(encode)])


def _base_groups(call: Call) -> list[Group]:
    symbols, classes, tables = call.arguments[:3]
    owners = np.broadcast_to(classes, symbols.shape)
    return [_group(symbols, owners == row, tables.base[row - 1]) for row in np.unique(classes)]


def _ternary_groups(call: Call) -> list[Group]:
    codes, classes, tables = call.arguments[:3]
    contexts, symbols = codes // CONTEXTS, codes % CONTEXTS
    owners = classes * CONTEXTS + contexts
    return [
        _group(symbols, owners == owner, tables.ternary[owner // CONTEXTS - 1, owner % CONTEXTS])
        for owner in np.unique(owners)
    ]


def _group(symbols: NDArray[np.uint8], belongs: NDArray[np.bool_], frequencies: NDArray[np.uint16]) -> Group:
    where = np.flatnonzero(belongs)
    picked = symbols.ravel()[where].astype(np.int32)
    first, last = int(picked.min()), int(picked.max())
    used = np.flatnonzero(frequencies[1:]) + 1 if len(frequencies) > CONTEXTS else np.arange(CONTEXTS)
    first, last = min(first, int(used[0])), max(last, int(used[-1]))
    return Group(frequencies[first : last + 1] / _TOTAL, first, picked - first, where)


def ans_encode(streams: list[list[Group]]) -> list[NDArray[np.uint32]]:
    """Every stream through constriction's ANS coder, last table first: it is a stack."""
    out = []
    for stream in streams:
        coder = constriction.stream.stack.AnsCoder()
        for group in reversed(stream):
            coder.encode_reverse(group.symbols, group.model)
        out.append(coder.get_compressed())
    return out


def ans_decode(streams: list[list[Group]], coded: list[NDArray[np.uint32]]) -> Iterator[list[NDArray[np.int32]]]:
    """The inverse."""
    for stream, words in zip(streams, coded, strict=True):
        coder = constriction.stream.stack.AnsCoder(words)
        yield [coder.decode(group.model, len(group.symbols)) for group in stream]


def ans_decode_in_place(work: Workload, coded: list[NDArray[np.uint32]]) -> Iterator[NDArray[np.uint8]]:
    """``ans_decode``, the symbols delivered as ``[tokens, columns]``."""
    for call, stream, words in zip(work.decodes, work.groups, coded, strict=True):
        coder = constriction.stream.stack.AnsCoder(words)
        matrix = np.empty(call.result.size, np.uint8)
        for group in stream:
            matrix[group.where] = coder.decode(group.model, len(group.symbols)) + group.first
        yield matrix.reshape(call.result.shape)


def range_encode(streams: list[list[Group]]) -> list[NDArray[np.uint32]]:
    """Every stream through constriction's range coder."""
    out = []
    for stream in streams:
        coder = constriction.stream.queue.RangeEncoder()
        for group in stream:
            coder.encode(group.symbols, group.model)
        out.append(coder.get_compressed())
    return out


def range_decode(streams: list[list[Group]], coded: list[NDArray[np.uint32]]) -> Iterator[list[NDArray[np.int32]]]:
    """The inverse."""
    for stream, words in zip(streams, coded, strict=True):
        coder = constriction.stream.queue.RangeDecoder(words)
        yield [coder.decode(group.model, len(group.symbols)) for group in stream]


def check(work: Workload, stacked: list[NDArray[np.uint32]], queued: list[NDArray[np.uint32]]) -> None:
    """Stop unless every decoder returns the symbols that were encoded."""
    for encode, decode in zip(work.encodes, work.decodes, strict=True):
        symbols = encode.arguments[0] if encode.function is rans.encode_base else encode.arguments[0] % CONTEXTS
        assert np.array_equal(symbols, decode.result), f"{work.name}: kvwire decoded other symbols"
        assert np.array_equal(decode.repeat(), decode.result), f"{work.name}: kvwire decodes differently each time"
    for decode, placed in zip(work.decodes, ans_decode_in_place(work, stacked), strict=True):
        assert np.array_equal(placed, decode.result), f"{work.name}: constriction decoded other symbols"
    for found in (ans_decode(work.groups, stacked), range_decode(work.groups, queued)):
        for stream, parts in zip(work.groups, found, strict=True):
            same = all(np.array_equal(group.symbols, part) for group, part in zip(stream, parts, strict=True))
            assert same, f"{work.name}: constriction decoded other symbols"


def _drain(results: Iterator[object]) -> None:
    """Let go of each result before the next one is made, as a reader of many segments does."""
    deque(results, maxlen=0)


def measure(work: Workload, rounds: int) -> dict[str, Any]:
    """Msym/s of all coders on one workload, and the ratios of each round."""
    streams = work.groups
    stacked, queued = ans_encode(streams), range_encode(streams)
    check(work, stacked, queued)
    decoding = interleaved(
        {
            "kvwire": lambda: _drain(call.repeat() for call in work.decodes),
            _ANS: lambda: _drain(ans_decode(streams, stacked)),
            _PLACED: lambda: _drain(ans_decode_in_place(work, stacked)),
            _RANGE: lambda: _drain(range_decode(streams, queued)),
        },
        rounds,
    )
    encoding = interleaved(
        {
            "kvwire": lambda: _drain(call.repeat() for call in work.encodes),
            _ANS: lambda: ans_encode(streams),
            _RANGE: lambda: range_encode(streams),
        },
        rounds,
    )
    words = {"kvwire": sum(2 * len(call.result.words) + 6 * len(call.result.states) for call in work.encodes)}
    words |= {_ANS: sum(part.nbytes for part in stacked), _RANGE: sum(part.nbytes for part in queued)}
    lanes = sorted(len(call.result.states) for call in work.encodes)
    return {
        "symbols": work.symbols,
        "streams": len(work.encodes),
        "lanes": {"least": lanes[0], "greatest": lanes[-1]},
        "bits_per_symbol": {name: 8 * size / work.symbols for name, size in words.items()},
        "decode_msym_s": _speeds(decoding, work.symbols),
        "encode_msym_s": _speeds(encoding, work.symbols),
        "decode_over_ans": summary(ratios(decoding[_ANS], decoding["kvwire"])),
        "decode_over_ans_in_place": summary(ratios(decoding[_PLACED], decoding["kvwire"])),
        "decode_over_range": summary(ratios(decoding[_RANGE], decoding["kvwire"])),
        "encode_over_ans": summary(ratios(encoding[_ANS], encoding["kvwire"])),
    }


def _speeds(seconds: dict[str, list[float]], symbols: int) -> dict[str, dict[str, float]]:
    return {name: summary([symbols / taken / 1e6 for taken in found]) for name, found in seconds.items()}


def print_results(results: dict[str, dict[str, Any]]) -> None:
    """Table and acceptance lines."""
    rows = []
    for name, found in results.items():
        for codec, decode in found["decode_msym_s"].items():
            encode = found["encode_msym_s"].get(codec)
            rows.append(
                [
                    f"{name}: {codec}",
                    f"{found['bits_per_symbol'].get(codec, found['bits_per_symbol'][_ANS]):.3f}",
                    f"{decode['median']:.0f}",
                    f"{decode['least']:.0f} to {decode['greatest']:.0f}",
                    f"{encode['median']:.0f}" if encode else "",
                    f"{encode['least']:.0f} to {encode['greatest']:.0f}" if encode else "",
                ]
            )
    print(table(["Msym/s, one thread", "bits/symbol", "decode", "spread", "encode", "spread"], rows))
    for name, found in results.items():
        ratio = found["decode_over_ans"]["median"]
        word = "met" if ratio >= TARGET else "MISSED"
        print(
            f"{name}: decodes {ratio:.1f} times as fast as {_ANS} (target {TARGET:.0f}): {word}; "
            f"{found['decode_over_ans_in_place']['median']:.1f} times in place; "
            f"{found['decode_over_range']['median']:.1f} times {_RANGE}; "
            f"encodes {found['encode_over_ans']['median']:.2f} times as fast"
        )


def main() -> None:
    """Record the streams of a blob, check, time, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "entropy_speed")
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    documents = calibration(engine, args.fit, 12, CONTEXT_TOKENS, args.seed)
    profile = kvwire.fit_profile(engine.prefill(documents), statistics=engine.statistics(documents))
    assert profile is not None, "calibration needs at least one window"
    texts = default_texts() or args.fit
    (cache,) = engine.prefill(windows(engine, texts[0], 1, CONTEXT_TOKENS, args.seed))
    default = Ladder()
    finest = Ladder(default.steps[-1], default.names[-1:])
    one_thread()
    works = [
        workload("base symbols of a blob, level 0", "base", cache, profile, default),
        workload("base symbols, finest level alone", "base", cache, profile, finest),
        workload("ternary refinements of a blob", "ternary", cache, profile, default),
        laplacian(args.seed),
    ]
    results = {work.name: measure(work, args.rounds) for work in works}
    print_results(results)
    settings = {
        "model": args.model.resolve().name,
        "seed": args.seed,
        "rounds": args.rounds,
        "threads": 1,
        "context_tokens": CONTEXT_TOKENS,
    }
    write_json(args.out, "entropy_speed", settings, results)


if __name__ == "__main__":
    main()
