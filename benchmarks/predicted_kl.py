"""The KL divergence that a blob's index predicts, against the one that is measured, on text that nothing was fitted on.

The profile is fitted on novels, its error calibrated on further ones (``kvwire.calibrate_error``); texts are a novel,
an encyclopaedia and question sets. Predictions are what ``kvwire.inspect`` says of each level; divergences are those of
the next token over the 256 tokens after the context.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import SHARED, add_common_options, calibration, default_texts, summary, table, windows, write_json
from rate_distortion import question_windows
from versus_cachegen import CONTINUATION, Exact, compare, predictions

import kvwire

if TYPE_CHECKING:
    from kvwire import Profile, TransformersEngine

HELD_OUT = 6
"""Windows behind those of the fit that the error is calibrated on, as ``Corpus.calibrate`` does."""
FACTOR = 2.0
"""Predictions are to be within this factor of what is measured."""


def measure_window(
    engine: TransformersEngine, profile: Profile, ids: list[int], context: int
) -> dict[str, tuple[float, float]]:
    """Predicted and measured divergence of each level on one window."""
    (cache,) = engine.prefill([ids[:context]])
    fed = ids[context:-1]
    exact = Exact(predictions(engine, cache, fed, context), fed, torch.tensor(ids[context + 1 :])[:, None], context)
    blob = kvwire.encode(cache, profile)
    out = {}
    for index, level in enumerate(kvwire.inspect(blob).levels):
        decoded = kvwire.decode(blob, index, profile, dtype=torch.float32)
        kl = compare(engine, exact, decoded, level.name, level.bits_per_element).kl
        out[level.name] = (level.predicted_kl or 0.0, kl)
    return out


def summarise(found: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """For each level: mean prediction, mean measurement, their ratio, and the spread of single windows' ratios."""
    out = {}
    for level in found[0]:
        predicted = statistics.fmean(each[level][0] for each in found)
        measured = statistics.fmean(each[level][1] for each in found)
        ratio = predicted / measured
        out[level] = {
            "predicted": predicted,
            "measured": measured,
            "ratio": ratio,
            "met": 1 / FACTOR <= ratio <= FACTOR,
            "of_windows": summary([each[level][0] / each[level][1] for each in found]),
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
        msg = "calibration needs at least one window"
        raise SystemExit(msg)
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
                f"{row['predicted']:.1e}",
                f"{row['measured']:.1e}",
                f"{row['ratio']:.2f}",
                f"{row['of_windows']['least']:.2f} to {row['of_windows']['greatest']:.2f}",
                "met" if row["met"] else "MISSED",
            ]
            for level, row in results[kind].items()
        ]
        print(f"\n{kind}")
        print(table(["level", "predicted KL", "measured", "ratio", "of windows", f"within {FACTOR:g}x"], rows))
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
