"""What three further ideas would save of a blob's bits: an energy class per token, activity, and dependent quantising.

All three are measured on the coefficients that ``kvwire.encode`` codes, of text that neither profile nor tables have
seen, as ideal code lengths (the range coder is within 0.7 % of them). Tables are counted on the calibration texts.

* Energy class: each token names by how many classes all its columns' tables shift; what naming costs is counted.
* Activity: a refinement's table also depends on how large its four neighbours (token before and after, column before
  and after) are one level below, against what their classes let expect.
* Dependent quantising (trellis-coded, four states as in VVC, along the tokens of a column): one level alone, beside
  plain and rate-distortion-optimised rounding of that level alone, at equal squared error of coefficients.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ablation import _LEVELS, fitted, patched, prepare, settings
from measure import add_common_options, default_texts, one_thread, summary, table, write_json
from numba import njit

import kvwire
from kvwire.codec import Ladder
from kvwire.codec.entropy.tables import BIAS, CLASSES, ESCAPE, FINEST_SCALE, GRID_PER_LEVEL, column_classes
from kvwire.codec.format.segment import SegmentState, encode_segment
from kvwire.codec.transform.levels import ChunkLevels
from kvwire.codec.transform.quantiser import quantise, split_levels_naive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablation import Bench
    from numpy.typing import NDArray

    from kvwire import KVCache, Profile
    from kvwire.codec.entropy.tables import Tables

SHIFTS = range(-9, 10)
"""Classes by which a token may move."""
EDGES = (0.5, 0.8, 1.25)
"""Between the buckets of activity, which is a ratio to what is expected."""
OPTIMISED_STEPS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
DEPENDENT_STEPS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1)
"""Of quantisers that are compared, over the level's; of dependent ones, between the multiples of both together."""
TRELLIS_LEVELS = (1, 2, 3)
_ESCAPE_BITS = 32.0
_CAP = 15
_MULTIPLIER = np.log(2.0) / 6.0  # of step^2: the slope of a fine uniform quantiser's distortion over its rate
_ROUNDS = 4
_PRIOR = 0.5


@dataclass(frozen=True)
class Level:
    """One level of a chunk as it is coded. contexts is None at level 0, where symbols are base symbols."""

    values: NDArray[np.int32]
    below: NDArray[np.int32]
    symbols: NDArray[np.uint8]
    contexts: NDArray[np.uint8] | None
    classes: NDArray[np.int64]
    columns: NDArray[np.uint32]


@dataclass(frozen=True)
class Chunk:
    """A chunk's coefficients, what they are coded with, and its levels."""

    coefficients: NDArray[np.float32]
    elements: float
    tables: Tables
    levels: list[Level]


def chunks_of(cache: KVCache, profile: Profile) -> list[Chunk]:
    """What ``kvwire.encode`` codes of a cache."""
    seen: list[tuple[Any, ...]] = []

    class Recorder(ChunkLevels):
        def __init__(self, coefficients: Any, ladder: Any, spread: Any, tables: Any) -> None:  # noqa: ANN401
            seen.append((coefficients.copy(), ladder, spread, tables))
            super().__init__(coefficients, ladder, spread, tables)

    with patched([(_LEVELS, "ChunkLevels", Recorder)]):
        info = kvwire.inspect(kvwire.encode(cache, profile, threads=1))
    elements = sum(each.numel() for each in (*cache.keys, *cache.values)) / info.tokens
    return [_chunk(*one, elements) for one in seen]


def _chunk(
    coefficients: NDArray[np.float32], ladder: Ladder, spread: NDArray[np.int64], tables: Tables, elements: float
) -> Chunk:
    values, refinements = split_levels_naive(quantise(coefficients, ladder.steps[-1]), len(ladder.steps))
    unit, state = column_classes(coefficients), SegmentState(len(coefficients), spread, tables)
    levels = []
    for level, shift in enumerate(ladder.shifts):
        below = state.values
        encode_segment(state, shift, unit - shift, values[level], refinements[level - 1] if level else None)
        columns = state.columns
        if level:
            symbols, contexts = refinements[level - 1][:, columns], np.minimum(np.abs(below[:, columns]), 2)
            found = contexts.astype(np.uint8)
        else:
            picked = values[0][:, columns]
            symbols, found = np.where(np.abs(picked) < BIAS, picked + BIAS, ESCAPE).astype(np.uint8), None
        levels.append(Level(values[level], below, symbols, found, state.classes[columns], columns))
    return Chunk(coefficients, elements * len(coefficients), tables, levels)


def plain_bits(chunk: Chunk, level: Level, shift: int = 0) -> NDArray[np.float64]:
    """Ideal bits of a level's symbols, ``[tokens, columns]``, with tables of classes that lie so much higher."""
    rows = np.clip(level.classes + shift, 1, CLASSES)[None, :] - 1
    if level.contexts is None:
        frequencies = chunk.tables.base[rows, level.symbols]
        escapes = chunk.tables.base[rows, ESCAPE]
        return np.where(
            frequencies > 0,
            12 - np.log2(np.maximum(frequencies, 1).astype(np.float64)),
            12 - np.log2(escapes.astype(np.float64)) + _ESCAPE_BITS,
        )
    return 12 - np.log2(chunk.tables.ternary[rows, level.contexts, level.symbols].astype(np.float64))


def with_token_classes(chunk: Chunk) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Bits of each level as it is and with each token's best shift, and what naming the shifts costs."""
    plain = [plain_bits(chunk, level).sum(1) for level in chunk.levels]
    every = np.array([[plain_bits(chunk, level, shift).sum(1) for level in chunk.levels] for shift in SHIFTS])
    share = np.full(len(SHIFTS), 1 / len(SHIFTS))
    chosen = np.zeros(every.shape[-1], np.int64)
    for _ in range(_ROUNDS):
        chosen = (every.sum(1) - np.log2(share)[:, None]).argmin(0)
        share = (np.bincount(chosen, minlength=len(SHIFTS)) + _PRIOR) / (len(chosen) + _PRIOR * len(SHIFTS))
    best = np.take_along_axis(every, chosen[None, None, :], 0)[0]
    return np.array([each.sum() for each in plain]), best.sum(1), float(-np.log2(share[chosen]).sum())


def activity(level: Level) -> NDArray[np.int64]:
    """Each symbol's bucket: what lies around it one level below over what its neighbours' classes let expect."""
    sizes = np.abs(level.below[:, level.columns]).astype(np.float64)
    scale = FINEST_SCALE * 3.0 ** ((level.classes - 1 - GRID_PER_LEVEL) / GRID_PER_LEVEL) / np.sqrt(2)
    expected = np.broadcast_to(scale[None, :], sizes.shape)

    def around(values: NDArray[np.float64]) -> NDArray[np.float64]:
        padded = np.pad(values, 1)
        found: NDArray[np.float64] = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        return found

    return np.searchsorted(EDGES, (around(sizes) + 0.05) / (around(expected) + 0.05))


def count_activity(chunks: Sequence[Chunk]) -> NDArray[np.float64]:
    """How often each refinement comes, ``[classes, contexts, buckets, symbols]``."""
    counts = np.zeros((CLASSES, 3, len(EDGES) + 1, 3))
    for level in (level for chunk in chunks for level in chunk.levels[1:]):
        rows = np.broadcast_to(level.classes[None, :] - 1, level.symbols.shape)
        np.add.at(counts, (rows, level.contexts, activity(level), level.symbols), 1)
    return counts


def with_activity(chunk: Chunk, counts: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Bits of each refinement by tables that know no activity, and by tables that do, counted on the same texts."""
    before, after = [], []
    merged = counts.sum(2, keepdims=True)
    usual = (merged + 1) / (merged + 1).sum(-1, keepdims=True)
    finer = counts + 64 * usual
    finer = finer / finer.sum(-1, keepdims=True)
    for level in chunk.levels[1:]:
        rows = np.broadcast_to(level.classes[None, :] - 1, level.symbols.shape)
        before.append(float(-np.log2(usual[rows, level.contexts, 0, level.symbols]).sum()))
        after.append(float(-np.log2(finer[rows, level.contexts, activity(level), level.symbols]).sum()))
    return before, after


@njit(cache=True)
def trellis(  # noqa: C901, PLR0912 - one Viterbi search, states by candidates
    values: NDArray[np.float64], rows: NDArray[np.int64], bits: NDArray[np.float64], weight: float, states: int
) -> NDArray[np.int64]:
    """Choose quantised values, each with the least squared error plus ``weight`` times bits.

    values ``[tokens, columns]`` in steps; rows ``[columns]`` of ``bits [rows, states, 2 * cap + 1]``. One state:
    multiples of 1. Four: states 0 and 1 have the even multiples, 2 and 3 the odd ones and 0, and parity leads on.
    """
    tokens, columns = values.shape
    cap = (bits.shape[2] - 1) // 2
    out = np.zeros((tokens, columns), np.int64)
    came, picked = np.zeros((tokens, states), np.int64), np.zeros((tokens, states), np.int64)
    for column in range(columns):
        row = rows[column]
        costs = np.full(states, 1e30)
        costs[0] = 0.0
        for token in range(tokens):
            value = values[token, column]
            size, sign = abs(value), 1 if value >= 0 else -1
            fresh = np.full(states, 1e30)
            for state in range(states):
                if costs[state] > 1e29:
                    continue
                if states == 1:
                    low = int(size)
                elif state < 2:
                    low = int(size / 2)
                else:
                    low = int((size + 1) / 2)
                for step in range(-1, 3):
                    number = 0 if step < 0 else low - 1 + step
                    if number < 0 or (step >= 0 and number == 0):
                        continue
                    if states == 1:
                        made = float(number)
                    elif state < 2:
                        made = 2.0 * number
                    else:
                        made = max(2.0 * number - 1.0, 0.0)
                    place = cap + sign * min(number, cap)
                    spent = bits[row, state, place]
                    if number >= cap:
                        spent += 2 * np.log2(number - cap + 1.0) + 1
                    cost = costs[state] + (size - made) ** 2 + weight * spent
                    if states == 1:
                        target = 0
                    elif state < 2:
                        target = 2 * ((number & 1) ^ state)
                    else:
                        target = 2 * ((number & 1) ^ (state & 1)) + 1
                    if cost < fresh[target]:
                        fresh[target] = cost
                        came[token, target] = state
                        picked[token, target] = sign * number
            costs = fresh
        state = int(np.argmin(costs))
        for token in range(tokens - 1, -1, -1):
            out[token, column] = picked[token, state]
            state = came[token, state]
    return out


@njit(cache=True)
def states_of(numbers: NDArray[np.int64], states: int) -> NDArray[np.int64]:
    """The state in which each value of ``trellis`` is coded, as a decoder follows it."""
    out = np.zeros_like(numbers)
    for column in range(numbers.shape[1]):
        state = 0
        for token in range(numbers.shape[0]):
            out[token, column] = state
            parity = numbers[token, column] & 1
            if states > 1:
                state = 2 * (parity ^ state) if state < 2 else 2 * (parity ^ (state & 1)) + 1
    return out


@dataclass(frozen=True)
class Quantiser:
    """One way of quantising a level alone. weight: of bits against squared steps."""

    states: int
    weight: float

    def numbers(self, values: NDArray[np.float64], rows: NDArray[np.int64], bits: NDArray[np.float64]) -> Any:  # noqa: ANN401
        """Quantised values and their states."""
        if self.states == 1 and not self.weight:
            found = np.rint(values).astype(np.int64)
        else:
            found = trellis(values, rows, bits, self.weight, self.states)
        return found, states_of(found, self.states)

    def made(self, numbers: NDArray[np.int64], states: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the numbers stand for, in steps."""
        if self.states == 1:
            return numbers.astype(np.float64)
        odd = 2.0 * numbers - np.sign(numbers)
        return np.where(states < 2, 2.0 * numbers, odd)


def counted(numbers: NDArray[np.int64], states: NDArray[np.int64], rows: NDArray[np.int64], n: int) -> Any:  # noqa: ANN401
    """How often each number comes, ``[rows, states, 2 * cap + 1]``."""
    out = np.zeros((CLASSES, n, 2 * _CAP + 1))
    places = np.clip(numbers, -_CAP, _CAP) + _CAP
    np.add.at(out, (np.broadcast_to(rows[None, :], numbers.shape), states, places), 1)
    return out + out[:, :, ::-1]  # signs are even


def lengths(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bits of numbers that came so often."""
    found = counts + _PRIOR
    return -np.log2(found / found.sum(-1, keepdims=True))


def spent_on(
    numbers: NDArray[np.int64], states: NDArray[np.int64], rows: NDArray[np.int64], bits: NDArray[np.float64]
) -> float:
    """Bits of numbers, escapes in an Elias code."""
    beyond = np.maximum(np.abs(numbers) - _CAP, 0)
    places = np.clip(numbers, -_CAP, _CAP) + _CAP
    escapes = (2 * np.log2(beyond[np.abs(numbers) >= _CAP] + 1.0) + 1).sum()
    return float(bits[np.broadcast_to(rows[None, :], numbers.shape), states, places].sum() + escapes)


def quantised(
    train: Sequence[Chunk], held: Sequence[Chunk], level: int, way: Quantiser, step: float
) -> tuple[float, float]:
    """Bits and squared error of a level alone on the held chunks, with tables of the others."""
    scale = np.abs(np.arange(-_CAP, _CAP + 1))
    bits = np.broadcast_to(1.0 + scale, (CLASSES, way.states, 2 * _CAP + 1)).copy()

    def prepared(chunk: Chunk) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        coded = chunk.levels[level]
        return chunk.coefficients[:, coded.columns].astype(np.float64) / step, coded.classes - 1

    shown = [prepared(chunk) for chunk in train]
    for _ in range(_ROUNDS):
        found = [(*way.numbers(values, rows, bits), rows) for values, rows in shown]
        bits = lengths(sum(counted(numbers, states, rows, way.states) for numbers, states, rows in found))
    points = nearer(way, [values for values, _ in shown], found)
    spent = missed = 0.0
    for values, rows in map(prepared, held):
        numbers, states = way.numbers(values, rows, bits)
        spent += spent_on(numbers, states, rows, bits)
        sizes = np.minimum(np.abs(numbers), points.shape[2] - 1)
        made = way.made(numbers, states) - np.sign(numbers) * points[rows[None, :], states, sizes]
        missed += float(((made - values) ** 2).sum()) * step * step
    return spent, missed


def nearer(way: Quantiser, values: Sequence[NDArray[np.float64]], found: Sequence[Any]) -> NDArray[np.float64]:
    """Reconstruction points: by how many steps numbers of size 1 and 2 lie nearer to zero, ``[rows, states, 4]``."""
    sums, counts = np.zeros((2, CLASSES, way.states, 4))
    for value, (numbers, states, rows) in zip(values, found, strict=True):
        where = (np.broadcast_to(rows[None, :], numbers.shape), states, np.minimum(np.abs(numbers), 3))
        np.add.at(sums, where, np.sign(numbers) * (way.made(numbers, states) - value))
        np.add.at(counts, where, 1)
    out: NDArray[np.float64] = sums / (counts + 1)
    out[:, :, [0, 3]] = 0
    return out


def bits_at_error(curve: list[tuple[float, float]], wanted: float) -> float:
    """Bits at a squared error, straight between points on logarithmic axes."""
    errors, bits = np.log([error for _, error in curve]), np.log([spent for spent, _ in curve])
    order = np.argsort(errors)
    if not errors[order[0]] <= np.log(wanted) <= errors[order[-1]]:
        msg = "the steps that were tried do not reach the error that is compared: widen them"
        raise ValueError(msg)
    return float(np.exp(np.interp(np.log(wanted), errors[order], bits[order])))


def trellis_gains(train: Sequence[Chunk], held: Sequence[Chunk], level: int) -> dict[str, float]:
    """Bits of each way over plain rounding's at plain rounding's error."""
    step = Ladder().steps[level]
    plain, error = quantised(train, held, level, Quantiser(1, 0.0), step)
    optimised = [quantised(train, held, level, Quantiser(1, _MULTIPLIER), step * by) for by in OPTIMISED_STEPS]
    dependent = [quantised(train, held, level, Quantiser(4, 2.5 * _MULTIPLIER), step * by) for by in DEPENDENT_STEPS]
    return {
        "optimised rounding": round(bits_at_error(optimised, error) / plain, 4),
        "dependent quantising": round(bits_at_error(dependent, error) / plain, 4),
    }


def measure(bench: Bench, profile: Profile, train_windows: int) -> dict[str, Any]:
    """All three ideas; bits are over those of the shipped tables, cumulated up to each level."""
    train = [chunk for cache in bench.caches[:train_windows] for chunk in chunks_of(cache, profile)]
    held = [chunks_of(window.cache, profile) for window in bench.windows]
    counts = count_activity(train)
    names = Ladder().names
    energy: dict[str, list[float]] = {name: [] for name in names}
    active: dict[str, list[float]] = {name: [] for name in names[1:]}
    named = []
    for chunks in held:
        plain, best, naming = (
            sum(parts) for parts in zip(*(with_token_classes(chunk) for chunk in chunks), strict=True)
        )
        named.append(naming / sum(len(chunk.coefficients) for chunk in chunks))
        for level, name in enumerate(names):
            energy[name].append((best[: level + 1].sum() + naming) / plain[: level + 1].sum())
        before, after = (np.sum(each, axis=0) for each in zip(*(with_activity(c, counts) for c in chunks), strict=True))
        for level, name in enumerate(names[1:]):
            saved = before[: level + 1].sum() - after[: level + 1].sum()
            active[name].append(1 - saved / plain[: level + 2].sum())
    flat = [chunk for chunks in held for chunk in chunks]
    return {
        "energy class per token": {name: summary(each) for name, each in energy.items()},
        "bits to name a token's class": summary(named),
        "activity one level below": {name: summary(each) for name, each in active.items()},
        "one level alone": {names[level]: trellis_gains(train, flat, level) for level in TRELLIS_LEVELS},
        "bits an element, ideal": {
            name: round(
                sum(plain_bits(c, one).sum() for c in flat for one in c.levels[: level + 1])
                / sum(c.elements for c in flat),
                4,
            )
            for level, name in enumerate(names)
        },
    }


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "rate_ideas")
    parser.add_argument("--text", type=Path, nargs="+", default=default_texts(), help="unseen texts to measure on")
    parser.add_argument("--contexts", type=int, default=1024, help="tokens in a cached context")
    parser.add_argument("--windows", type=int, default=3, help="contexts from each text")
    parser.add_argument("--calibration", type=int, default=16, help="windows that profiles are fitted on")
    parser.add_argument("--train", type=int, default=6, help="of them, those that tables are counted on")
    return parser.parse_args()


def main() -> None:
    """Fit, measure, print, save."""
    args = options()
    one_thread()
    bench = prepare(args)
    profile, _ = fitted(bench, settings()[0])
    assert profile is not None, "the default is a profile"
    found = measure(bench, profile, args.train)
    names = Ladder().names
    rows = [
        [idea, *(f"{found[idea][name]['median']:.3f}" if name in found[idea] else "" for name in names)]
        for idea in ("energy class per token", "activity one level below")
    ]
    rows += [
        [f"{way}, level alone", *(f"{found['one level alone'].get(name, {}).get(way, '')}" for name in names)]
        for way in ("optimised rounding", "dependent quantising")
    ]
    print(table(["bits over today's", *names], rows))
    shared = {
        "model": args.model.resolve().name,
        "seed": args.seed,
        "context_tokens": args.contexts,
        "windows_per_text": args.windows,
        "calibration_windows": args.calibration,
        "windows_counted": args.train,
        "exact": "float32",
    }
    write_json(args.out, "rate_ideas", shared, found)


if __name__ == "__main__":
    main()
