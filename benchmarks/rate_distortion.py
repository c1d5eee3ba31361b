"""Size against quality of kvwire and of its rivals: three kinds of text, several context lengths, shifted calibration.

Size is bits for each element of the original tensors, everything counted: for kvwire the whole blob up to the level
(header, index, token ids, segments), for the rivals the bytes of a stream that was really written and read back, for
CacheGen what ``cachegen`` says. What is fitted once for each model (kvwire's profile, KVTC's basis) is reported apart.

Quality compares a decoded cache with the exact float32 one over the 256 tokens after the context: mean KL divergence of
the next-token distribution, change of perplexity, greedy agreement, and the attention layers' outputs (squared error
over squared length, the mean over all layers).

Everything is fitted on novels, so a novel is in-domain and the other kinds are shifted; ``--shift`` also fits on an
encyclopaedia and measures on both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import (
    SHARED,
    add_common_options,
    calibration,
    default_texts,
    one_thread,
    table,
    windows_in,
    write_json,
)
from quality import (
    CONTINUATION,
    NOVEL,
    QUESTIONS,
    Exact,
    Figures,
    bits_at,
    compare,
    curve,
    predictions,
    question_windows,
    summarise,
)
from quality import MEASURES as PLAIN
from rivals.codecs import KVTC, KVTC_SCALED, ONE_STEP, RELEASED, Fitted, fit, fitted_codings, plain_codings
from tqdm import tqdm

import kvwire
from kvwire.engines.transformers.capture import QueryRecorder, recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from kvwire import TransformersEngine

ENCYCLOPAEDIA = "encyclopaedia"
MEASURES = (*PLAIN, "attention_error")
KLS = (1e-3, 5e-4, 2e-4, 1e-4, 5e-5)
"""KL divergences at which curves are compared."""
CALIBRATION_TOKENS = 1024
MIDDLE = 1024
"""The context length that is drawn, and that ``--shift`` measures; the nearest one where it is not among them."""
LONG = 2048
"""Longer contexts get half the windows."""


class AttentionOutputs:
    """Keeps what each attention layer of a model last returned."""

    def __init__(self, engine: TransformersEngine) -> None:
        """Run a few tokens to see which modules attend."""
        recorder = QueryRecorder(engine.meta, engine.model)
        with recording(recorder, engine.model):
            engine.forward(None, [0, 1], 0)
        if not recorder.modules:
            raise SystemExit("this model's attention cannot be watched; open one that attends with sdpa or eager")
        self._modules = recorder.modules

    @contextmanager
    def kept(self) -> Iterator[dict[int, Tensor]]:
        """The outputs of the passes made inside the block, by layer, ``[tokens, hidden]``; the last pass counts."""
        outputs: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer, module in self._modules.items():

                def keep(_module: object, _inputs: object, out: Any, layer: int = layer) -> None:  # noqa: ANN401
                    outputs[layer] = (out[0] if isinstance(out, tuple) else out)[0].detach().double()

                stack.callback(module.register_forward_hook(keep).remove)
            yield outputs


def relative_error(exact: Mapping[int, Tensor], found: Mapping[int, Tensor]) -> float:
    """Squared error over squared length of each layer's outputs, the mean over layers."""
    shares = (float((found[n] - e).square().sum() / e.square().sum().clamp(min=1e-30)) for n, e in exact.items())
    return statistics.fmean(shares)


def measure_window(
    engine: TransformersEngine, watch: AttentionOutputs, fitted: Fitted, ids: list[int], context: int, *, plain: bool
) -> Iterator[dict[str, Any]]:
    """Every codec on one window: ``context`` tokens cached, 256 more fed, one more as the last target."""
    (cache,) = engine.prefill([ids[:context]])
    elements = context * cache.meta.elements_per_token
    fed = ids[context:-1]
    with watch.kept() as outputs:
        log_p = predictions(engine, cache, fed, context)
        exact = Exact(log_p, fed, torch.tensor(ids[context + 1 :])[:, None], context)
        wanted = dict(outputs)
        codings = itertools.chain(fitted_codings(cache, fitted), plain_codings(cache, fitted) if plain else ())
        for coding in codings:
            point = compare(engine, exact, coding.cache, coding.codec, 8 * coding.size / elements)
            yield asdict(point) | {"family": coding.family, "attention_error": relative_error(wanted, outputs)}


def ratios(figures: Figures, variants: Sequence[str]) -> dict[str, Any]:
    """Bits of each kvwire variant over a rival's at equal KL; None where a curve does not reach it."""
    out: dict[str, Any] = {}
    released = figures.get(RELEASED)
    for variant in variants:
        mine = curve(figures, variant)
        rivals = {family: curve(figures, family) for family in (KVTC, KVTC_SCALED, ONE_STEP)}
        found = {
            family: {f"{kl:.0e}": _ratio(bits_at(mine, kl), bits_at(theirs, kl)) for kl in KLS}
            for family, theirs in rivals.items()
        }
        if released:
            kl, bits = released["kl"]["mean"], released["bits_per_element"]["mean"]
            found[RELEASED] = {f"{kl:.1e}": _ratio(bits_at(mine, kl), bits)}
        out[variant] = found
    return out


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs


def print_figures(title: str, figures: Figures, found: dict[str, Any]) -> None:
    """One kind and length: the table, then the ratios."""
    head = ["codec", "bits/element", "mean KL", "KL of windows", "perplexity", "greedy", "attention error"]
    rows = [
        [
            name,
            f"{row['bits_per_element']['mean']:.3f}",
            f"{row['kl']['mean']:.2e}",
            f"{row['kl']['least']:.1e} to {row['kl']['greatest']:.1e}",
            f"{100 * row['perplexity_change']['mean']:+.3f} %",
            f"{100 * row['agreement']['mean']:.2f} %",
            f"{row['attention_error']['mean']:.2e}",
        ]
        for name, row in figures.items()
    ]
    print(f"\n{title}\n{table(head, rows)}")
    for variant, rivals in found.items():
        for rival, at in rivals.items():
            told = ", ".join(f"{_told(ratio)} at KL {kl}" for kl, ratio in at.items())
            print(f"{variant} / {rival}, bits at equal KL: {told}")


def draw_windows(engine: TransformersEngine, args: argparse.Namespace, kind: str, context: int) -> list[list[int]]:
    """Windows of one kind and length; an encyclopaedia's from its second half, since ``--shift`` fits on the first."""
    count = args.windows if context <= LONG else -(-args.windows // 2)
    path: Path = getattr(args, kind)
    if kind == QUESTIONS:
        return question_windows(engine, path, count, context, args.seed)
    text = path.read_text(encoding="utf-8")
    part = text[len(text) // 2 :] if kind == ENCYCLOPAEDIA else text
    return windows_in(engine, part, path.name, count, context + CONTINUATION + 1, args.seed)


def measure_kind(
    engine: TransformersEngine, fitted: Fitted, drawn: list[list[int]], context: int, title: str, *, plain: bool
) -> dict[str, Any]:
    """All codecs over all windows of one kind and length: printed, and returned for the file."""
    watch = AttentionOutputs(engine)
    points: list[dict[str, Any]] = []
    for ids in tqdm(drawn, desc=title, unit="window", disable=None, leave=False, file=sys.stderr):
        points += measure_window(engine, watch, fitted, ids, context, plain=plain)
    figures = summarise(points, MEASURES)
    found = ratios(figures, [variant.name for variant in fitted.variants])
    print_figures(f"{title} ({len(drawn)} windows)", figures, found)
    return {"codecs": figures, "ratios": found}


def measure_shift(
    engine: TransformersEngine, args: argparse.Namespace, kinds: list[str], context: int
) -> dict[str, Any]:
    """Fit on the first half of the encyclopaedia; measure on the novel (shifted) and on the second half (in-domain)."""
    if ENCYCLOPAEDIA not in kinds:
        raise SystemExit("--shift fits on an encyclopaedia; name one with --encyclopaedia")
    path: Path = args.encyclopaedia
    text = path.read_text(encoding="utf-8")
    first = text[: len(text) // 2]
    tokens = calibration_tokens(engine)
    fitted = fit(engine, windows_in(engine, first, path.name, args.calibration, tokens, args.seed))
    return {
        kind: measure_kind(
            engine,
            fitted,
            draw_windows(engine, args, kind, context),
            context,
            f"{kind}, {context} tokens, fitted on {ENCYCLOPAEDIA}",
            plain=False,
        )
        for kind in (NOVEL, ENCYCLOPAEDIA)
        if kind in kinds
    }


def print_domains(kinds: dict[str, dict[int, Any]], shift: dict[str, Any], context: int) -> None:
    """The summary: bits at equal KL, in-domain and shifted. context: the length that ``shift`` was measured at."""
    cases = [(f"{kind}, {length}", found) for kind, lengths in kinds.items() for length, found in lengths.items()]
    cases += [(f"{kind}, {context}, fitted on {ENCYCLOPAEDIA}", found) for kind, found in shift.items()]
    rows = [
        [f"{case}: {variant} / {rival}", *map(_told, at.values())]
        for case, found in cases
        for variant, rivals in found["ratios"].items()
        for rival, at in rivals.items()
        if rival in {KVTC, ONE_STEP}
    ]
    print("\nbits at equal KL; fitted on novels unless said otherwise, so a novel is in-domain, the others are shifted")
    print(table(["", *(f"KL {kl:.0e}" for kl in KLS)], rows))
    for case, found in cases:
        for variant, rivals in found["ratios"].items():
            for kl, ratio in rivals.get(RELEASED, {}).items():
                times = "-" if ratio is None else f"1/{1 / ratio:.1f}"
                print(f"{case}: {variant} needs {times} of the bits of {RELEASED}, at its KL of {kl}")


def _told(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


_STYLES = {
    KVTC: ("s--", "tab:orange"),
    KVTC_SCALED: ("D:", "tab:olive"),
    ONE_STEP: ("v--", "tab:green"),
    f"{KVTC}, 128 raw": ("s:", "gold"),
    "CacheGen, 256": ("^--", "tab:red"),
    "CacheGen, 1024": ("^:", "tab:pink"),
    "KIVI": ("P--", "tab:purple"),
    "KIVI, 128 raw": ("P:", "plum"),
    "int4, int8, zstd": ("X--", "tab:brown"),
    "bfloat16, zstd": ("*", "black"),
}


def draw(path: Path, kinds: dict[str, tuple[int, Figures]], variants: Sequence[str]) -> None:
    """Bits for each element against KL divergence: a panel for each kind, one legend below them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    blues = ["tab:blue", "navy", "deepskyblue", "slateblue", "teal", "steelblue"]
    styles = dict(zip(variants, (("o-", blue) for blue in itertools.cycle(blues)), strict=False)) | _STYLES
    figure, panels = plt.subplots(1, len(kinds), figsize=(5.2 * len(kinds), 5.8), sharey=True, squeeze=False)
    for panel, (kind, (context, figures)) in zip(panels[0], kinds.items(), strict=True):
        for family, (style, colour) in styles.items():
            points = curve(figures, family)
            wide = 2.4 if family in variants else 1.2
            if points:
                panel.plot(*zip(*points, strict=True), style, color=colour, label=family, linewidth=wide, markersize=5)
        panel.set(xscale="log", yscale="log", title=f"{kind}, {context} tokens")
        panel.set_xlabel("bits per element, everything counted")
        panel.grid(visible=True, which="major", alpha=0.3)
        ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_xticks([], minor=True)
    panels[0][0].set_ylabel("mean KL divergence of the next token")
    handles, labels = panels[0][0].get_legend_handles_labels()
    columns = 4 if len(kinds) > 1 else 2
    figure.tight_layout(rect=(0, 0.05 * -(-len(labels) // columns), 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=columns, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
    print(f"written: {path.name}")


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "rate_distortion")
    texts = default_texts()
    encyclopaedia = next((path for path in texts if path.name.startswith("wikitext")), None)
    novel = next((path for path in texts if path != encyclopaedia), None)
    parser.add_argument("--novel", type=Path, default=novel, help="unseen text of the kind that is fitted on")
    parser.add_argument("--encyclopaedia", type=Path, default=encyclopaedia, help="unseen text of another kind")
    parser.add_argument("--questions", type=Path, default=SHARED / "text" / "qa" / "musique_s.json", help="JSON")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 3072], help="tokens of cached contexts")
    parser.add_argument("--windows", type=int, default=4, help=f"of each kind and length; half above {LONG} tokens")
    parser.add_argument("--calibration", type=int, default=16, help=f"windows of {CALIBRATION_TOKENS} tokens to fit on")
    parser.add_argument("--shift", action="store_true", help="also fit on the encyclopaedia")
    return parser.parse_args()


def present_kinds(args: argparse.Namespace) -> list[str]:
    """The kinds whose texts are there; says which are not."""
    kinds = []
    for kind in (NOVEL, ENCYCLOPAEDIA, QUESTIONS):
        path = getattr(args, kind)
        if path is not None and path.is_file():
            kinds.append(kind)
        else:
            print(f"no {kind}: {path or 'its default text'} is absent; name one with --{kind}", file=sys.stderr)
    if not kinds:
        raise SystemExit("no text to measure on; name some with --novel, --encyclopaedia, --questions")
    return kinds


def clamped(engine: TransformersEngine, asked: Sequence[int]) -> dict[int, int]:
    """Context lengths that leave room for the continuation, and what was asked for."""
    room = engine.window - CONTINUATION - 1
    if room < 1 or min(asked) < 1:
        msg = f"contexts of {asked} tokens and {CONTINUATION} more do not fit the model's window of {engine.window}"
        raise SystemExit(msg)
    return {min(context, room): context for context in asked}


def calibration_tokens(engine: TransformersEngine) -> int:
    """Length of a calibration window."""
    return min(CALIBRATION_TOKENS, engine.window)


def main() -> None:
    """Fit, measure, print, save."""
    args = options()
    one_thread()  # results do not depend on it; two threads on a busy machine wait for each other
    kinds = present_kinds(args)
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    fitted = fit(engine, calibration(engine, args.fit, args.calibration, calibration_tokens(engine), args.seed))
    contexts = clamped(engine, args.contexts)
    found: dict[str, dict[int, Any]] = {kind: {} for kind in kinds}
    for context, asked in contexts.items():
        note = "" if context == asked else f" ({asked} asked, clamped to the window less {CONTINUATION + 1})"
        for kind in kinds:
            drawn = draw_windows(engine, args, kind, context)
            title = f"{kind}, {context} tokens{note}"
            found[kind][context] = measure_kind(engine, fitted, drawn, context, title, plain=True)
    middle = min(contexts, key=lambda context: abs(context - MIDDLE))
    shift = measure_shift(engine, args, kinds, middle) if args.shift else {}
    print_domains(found, shift, middle)
    variants = [variant.name for variant in fitted.variants]
    sizes = {v.name: len(v.profile.data) for v in fitted.variants if v.profile is not None}
    settings = {
        "model": args.model.resolve().name,
        "seed": args.seed,
        "context_tokens": list(contexts),
        "context_tokens_asked": args.contexts,
        "continuation_tokens": CONTINUATION,
        "windows": args.windows,
        "calibration_windows": args.calibration,
        "calibration_tokens": calibration_tokens(engine),
        "exact": "float32",
    }
    results = {"kinds": found, f"fitted_on_{ENCYCLOPAEDIA}": shift, "shift_context": middle, "profile_bytes": sizes}
    write_json(args.out, "rate_distortion", settings, results)
    pictured = {kind: (middle, lengths[middle]["codecs"]) for kind, lengths in found.items()}
    draw(args.out.with_suffix(".png"), pictured, variants)


if __name__ == "__main__":
    main()
