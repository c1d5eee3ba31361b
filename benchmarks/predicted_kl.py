"""The KL divergence that a blob's index predicts, against the one that is measured, on text that nothing was fitted on.

The profile is fitted on novels, its error calibrated on further ones (``kvwire.calibrate_error``); texts are a novel,
an encyclopaedia and question sets. Predictions are what ``kvwire.inspect`` says of each level; divergences are those of
the next token over the 256 tokens after the context.

Where predictions fail, two figures say why: the divergence over the error at each level, which a perfect metric would
leave the same for all texts, and the same of the caches' projection on the profile's basis, not quantised: what the
directions cost that the profile has no coefficients for, because calibration text hardly needed them.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from measure import SHARED, add_common_options, calibration, default_texts, summary, table, windows, write_json
from quality import CONTINUATION, Exact, compare, predictions, question_windows

import kvwire
from kvwire.codec import positions_off, positions_on
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.transform.analysis import analyse, scatter_planes, synthesise

if TYPE_CHECKING:
    from kvwire import KVCache, Profile, TransformersEngine

HELD_OUT = 6
"""Windows behind those of the fit that the error is calibrated on, as ``Corpus.calibrate`` does."""
FACTOR = 2.0
"""Predictions are to be within this factor of what is measured."""
PROJECTED = "not quantised"


class Row(NamedTuple):
    """One level of one window: predicted and measured divergence, and the error in the blob's index."""

    predicted: float
    measured: float
    error: float


def projected(cache: KVCache, profile: Profile) -> tuple[KVCache, float]:
    """The cache without what the profile has no coefficients for, and the error of that for each element."""
    text = TextPredictor(profile, cache.tokens, cache.token_ids)
    coefficients, dropped = analyse(cache, text, 0, cache.tokens)
    off = positions_off(cache)
    keys, values = ([torch.empty_like(part) for part in side] for side in (off.keys, off.values))
    out, first = replace(off, keys=keys, values=values), 0
    for index, group in enumerate(profile.groups):
        own = torch.from_numpy(coefficients[:, first : first + group.rank])
        elements = synthesise(own, group, *text.expected(index, 0, cache.tokens))
        scatter_planes(elements, group.planes, out, off.meta, 0, {})
        first += group.rank
    return positions_on(out, cache.meta.offset), dropped / cache.tokens / cache.meta.elements_per_token


def measure_window(engine: TransformersEngine, profile: Profile, ids: list[int], context: int) -> dict[str, Row]:
    """Each level of one window, and its projection."""
    (cache,) = engine.prefill([ids[:context]])
    fed = ids[context:-1]
    exact = Exact(predictions(engine, cache, fed, context), fed, torch.tensor(ids[context + 1 :])[:, None], context)
    blob = kvwire.encode(cache, profile)
    out = {}
    for index, level in enumerate(kvwire.inspect(blob).levels):
        decoded = kvwire.decode(blob, index, profile, dtype=torch.float32)
        kl = compare(engine, exact, decoded, level.name, level.bits_per_element).kl
        out[level.name] = Row(level.predicted_kl or 0.0, kl, level.measured_error)
    rest, error = projected(cache, profile)
    out[PROJECTED] = Row(0.0, compare(engine, exact, rest, PROJECTED, 0.0).kl, error)
    return out


def summarise(found: list[dict[str, Row]]) -> dict[str, Any]:
    """For each level: mean prediction, mean measurement, their ratio, and the spread of single windows' ratios."""
    out: dict[str, Any] = {}
    for level in found[0]:
        predicted, measured, error = (
            statistics.fmean(column) for column in zip(*(each[level] for each in found), strict=True)
        )
        ratio = predicted / measured
        out[level] = {"error": error, "measured": measured, "measured_over_error": measured / error}
        if level == PROJECTED:
            continue
        out[level] |= {
            "predicted": predicted,
            "ratio": ratio,
            "met": 1 / FACTOR <= ratio <= FACTOR,
            "of_windows": summary([each[level].predicted / each[level].measured for each in found]),
        }
    return out


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "predicted_kl")
    parser.add_argument("--text", type=Path, nargs="+", default=default_texts(), help="unseen texts to measure on")
    parser.add_argument("--questions", type=Path, default=SHARED / "text" / "qa" / "musique_s.json", help="JSON")
    parser.add_argument("--contexts", type=int, default=1024, help="tokens in a cached context")
    parser.add_argument("--windows", type=int, default=8, help="contexts from each text")
    parser.add_argument("--calibration", type=int, default=16, help="windows that the profile is fitted on")
    return parser.parse_args()


def main() -> None:
    """Fit, calibrate, measure, print, save."""
    args = options()
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    drawn_to_fit = calibration(engine, args.fit, args.calibration + HELD_OUT, args.contexts, args.seed)
    documents, others = drawn_to_fit[: args.calibration], drawn_to_fit[args.calibration :]
    profile = kvwire.fit_profile(engine.prefill(documents), statistics=engine.statistics(documents))
    if profile is None:
        raise SystemExit("calibration needs at least one window")
    profile = kvwire.calibrate_error(engine, profile, others)
    tokens = args.contexts + CONTINUATION + 1
    drawn = {path.stem: windows(engine, path, args.windows, tokens, args.seed) for path in args.text}
    if args.questions.is_file():
        drawn["questions"] = question_windows(engine, args.questions, args.windows, args.contexts, args.seed)
    results = {}
    for kind, ids in drawn.items():
        results[kind] = summarise([measure_window(engine, profile, each, args.contexts) for each in ids])
        rows = [
            [
                level,
                f"{row['error']:.1e}",
                f"{row['measured_over_error']:.3f}",
                f"{row['predicted']:.1e}" if level != PROJECTED else "",
                f"{row['measured']:.1e}",
                f"{row['ratio']:.2f}" if level != PROJECTED else "",
                f"{row['of_windows']['least']:.2f} to {row['of_windows']['greatest']:.2f}"
                if level != PROJECTED
                else "",
                ("met" if row["met"] else "MISSED") if level != PROJECTED else "",
            ]
            for level, row in results[kind].items()
        ]
        print(f"\n{kind}")
        columns = ["level", "error", "KL over error", "predicted KL", "measured", "ratio", "of windows"]
        print(table([*columns, f"within {FACTOR:g}x"], rows), flush=True)
    settings = {
        "model": args.model.resolve().name,
        "seed": args.seed,
        "context_tokens": args.contexts,
        "windows": args.windows,
        "calibration_windows": args.calibration,
        "windows_kept_out_of_the_fit": HELD_OUT,
    }
    write_json(args.out, "predicted_kl", settings, {"error_to_kl": profile.error_to_kl, "texts": results})


if __name__ == "__main__":
    main()
