"""One setting of the codec changed at a time: what each part is worth, on text that the profile never saw.

Bits are those of the whole blob up to a level. Settings are compared by the bits that they need for the default's
quality at its levels 1, 2 and 3, straight between levels on both logarithmic axes: geometric mean over the three and
over the texts. Quality is the mean KL divergence of the next token over the 256 tokens after the context; it differs
much between windows, so the standard error of the ratio over windows stands beside it. It is also the blob's measured
error, which is steadier, but only compares settings that share the attention metric.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import statistics as stat
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from measure import add_common_options, calibration, default_texts, one_thread, summary, table, windows, write_json
from quality import CONTINUATION, Exact, compare, predictions
from test_parts.codec.naive_coding import chunk_levels_naive, energy_of

import kvwire
from kvwire.codec import Ladder
from kvwire.codec.backend import planes_of
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.transform.positions import positions_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvwire import KVCache, Profile, Statistics, TransformersEngine
    from kvwire.codec.entropy.tables import Tables

    Patch = tuple[str, str, Any]
    Curve = list[tuple[float, float]]

COMPARED = (1, 2, 3)
"""Levels of the default at whose quality settings are compared."""
DOCUMENTS = (100, 10_000)
"""Documents among which a profile's bytes are shared out."""
_REACH = 4.0
"""A curve is drawn on beyond its ends up to that many times the quality there, no further."""
_FIT, _METRIC, _REGRESSION, _ROUNDING = (
    f"kvwire.codec.fitting.{name}" for name in ("fit", "metric", "regression", "rounding")
)
_LEVELS = "kvwire.codec.transform.levels"
_NAIVE = "test_parts.codec.naive_coding"


@dataclass(frozen=True)
class Window:
    """An unseen context and what the model makes of its exact cache."""

    kind: str
    ids: list[int]
    cache: KVCache
    exact: Exact


@dataclass(frozen=True)
class Bench:
    """What all settings share: engine, calibration, windows, and the profile of the default settings."""

    engine: TransformersEngine
    documents: list[list[int]]
    caches: list[KVCache]
    statistics: Statistics
    windows: list[Window]
    other_documents: list[list[int]]
    default: Profile | None = None


@dataclass(frozen=True)
class Setting:
    """What differs from the default.

    fit: arguments of ``fit_profile``; statistics: changes them before the fit; patches: module, name and value, in
    force while fitting; encoding: the same while encoding. made: turns the default's profile into another, without a
    fit. prefix_layers: layers run anew. own_metric: measured errors are of another metric than the default's. apart: a
    blob for each level, with that level alone. identity: no profile; turned: every head turned by a Hadamard matrix.
    elsewhere: fitted on other windows of the same texts.
    """

    section: str
    name: str
    fit: dict[str, Any] = field(default_factory=dict)
    statistics: Callable[[Statistics], Statistics] | None = None
    patches: tuple[Patch, ...] = ()
    encoding: tuple[Patch, ...] = ()
    made: Callable[[Bench], Profile] | None = None
    prefix_layers: int = 0
    own_metric: bool = False
    apart: bool = False
    identity: bool = False
    turned: bool = False
    elsewhere: bool = False


@dataclass(frozen=True)
class Reading:
    """One setting, window and level."""

    level: str
    bits: float
    kl: float
    error: float
    columns: float


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Let names of modules mean something else for a while."""
    before = [(importlib.import_module(module), name) for module, name, _ in patches]
    kept = [getattr(module, name) for module, name in before]
    for (module, name), (_, _, value) in zip(before, patches, strict=True):
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in zip(before, kept, strict=True):
            setattr(module, name, value)


def diagonal_queries(statistics: Statistics) -> Statistics:
    """Of the query metric the diagonal alone, equal in the two halves of every rotated pair."""

    def diagonal(metric: torch.Tensor) -> torch.Tensor:
        halves = torch.diagonal(metric, dim1=1, dim2=2).reshape(len(metric), 2, -1).mean(1)
        return torch.diag_embed(torch.cat([halves, halves], 1))

    queries = tuple(None if metric is None else diagonal(metric) for metric in statistics.query_metric)
    return replace(statistics, query_metric=queries)


def gradients_alone(statistics: Statistics) -> Statistics:
    """Within a plane errors count as gradients say."""
    nothing = (None,) * len(statistics.query_metric)
    return replace(statistics, query_metric=nothing, value_metric=nothing)


def without_gradients(statistics: Statistics) -> Statistics:
    """Errors count as attention says, and planes alike."""
    return replace(statistics, gradients={}, fisher={})


def without_metrics(statistics: Statistics) -> Statistics:
    """Every error counts alike within a plane."""
    return replace(gradients_alone(statistics), gradients={})


def keys_apart(layers: Any, _: int) -> list[tuple[Any, ...]]:  # noqa: ANN401 - stands in for ``group_planes``
    """All layers' keys in one group, all values in another."""
    planes = planes_of(layers)
    return [tuple(plane for plane in planes if plane[0] == side) for side in ("key", "value")]


def dead_zone(offset: float) -> Callable[[NDArray[np.float32], float], NDArray[np.int32]]:
    """A quantiser that rounds up from ``1 - offset`` of a step on; 0.5 is to the nearest."""

    def quantise(coefficients: NDArray[np.float32], step: float) -> NDArray[np.int32]:
        scaled = coefficients * np.float32(1.0 / step)
        out: NDArray[np.int32] = (np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(offset))).astype(np.int32)
        return out

    return quantise


class NaiveLevels:
    """Stands in for ``ChunkLevels``, with whatever quantiser its twin has."""

    def __init__(
        self, coefficients: NDArray[np.float32], ladder: Ladder, spread: NDArray[np.int64], tables: Tables
    ) -> None:
        """Code all levels."""
        self.energy = energy_of(coefficients)
        self._coded = chunk_levels_naive(coefficients, ladder, spread, tables)

    def encode(self, level: int) -> tuple[bytes, int, float]:
        """What the twin made of a level."""
        return self._coded[level]


def middle_points(bench: Bench) -> Profile:
    """The default's profile, reconstructing in the middle of each bin."""
    profile = _default(bench)
    return replace(profile, tables=replace(profile.tables, points=np.zeros_like(profile.tables.points)))


def counted_anew(bench: Bench, offset: float) -> Profile:
    """The default's profile with tables and points counted behind a dead zone."""
    profile = _default(bench)
    fit = importlib.import_module(_FIT)
    with patched([(_FIT, "quantise", dead_zone(offset))]):
        texts = [TextPredictor(profile, cache.tokens, cache.token_ids) for cache in bench.caches]
        return replace(profile, tables=fit.count_tables(texts, bench.caches, Ladder()))


def _default(bench: Bench) -> Profile:
    assert bench.default is not None, "the default is fitted first"
    return bench.default


def settings() -> list[Setting]:
    """Every setting, the default first."""
    cut = importlib.import_module(_REGRESSION).TABLE_CUT
    spare = _default
    fast = {
        offset: ((_LEVELS, "ChunkLevels", NaiveLevels), (_NAIVE, "quantise", dead_zone(offset)))
        for offset in (0.4, 0.33)
    }
    return [
        Setting("default", "default"),
        Setting("text", "no prediction from text", {"text": False}),
        Setting("table", "table cut / 4", patches=((_REGRESSION, "TABLE_CUT", cut / 4),)),
        Setting("table", "table cut x 4", patches=((_REGRESSION, "TABLE_CUT", 4 * cut),)),
        Setting("text", "table cut x 40", patches=((_REGRESSION, "TABLE_CUT", 40 * cut),)),
        Setting("text", "table cut x 400", patches=((_REGRESSION, "TABLE_CUT", 400 * cut),)),
        Setting("head start", "head start of 1 layer", prefix_layers=1),
        Setting("head start", "head start of 2 layers", prefix_layers=2),
        Setting("metric", "query metric: diagonal only", statistics=diagonal_queries, own_metric=True),
        Setting("metric", "no metric within a plane", statistics=without_metrics, own_metric=True),
        Setting("metric", "planes alike", statistics=lambda given: replace(given, fisher={}), own_metric=True),
        *(Setting("metric", f"planes to the power {power:g}", patches=((_METRIC, "_INFORMATION_EXPONENT", power),),
                  own_metric=True) for power in (0.5, 1.0)),
        *(Setting("floor", f"metric floor {floor:g}", patches=((_METRIC, "_METRIC_FLOOR", floor),), own_metric=True)
          for floor in (0.001, 0.03)),
        Setting("gradients", "no gradients", statistics=without_gradients, own_metric=True),
        Setting("gradients", "gradients alone", statistics=gradients_alone, own_metric=True),
        Setting("table", "no gradients, table cut x 4", statistics=without_gradients,
                patches=((_REGRESSION, "TABLE_CUT", 4 * cut),), own_metric=True),
        Setting("groups", "one layer at a time", {"group_width": 512}),
        Setting("groups", "two layers at a time", {"group_width": 1024}),
        Setting("groups", "three layers at a time", {"group_width": 1536}),
        Setting("groups", "keys apart from values", patches=((_FIT, "group_planes", keys_apart),)),
        Setting("size", "matrices less precise", {"small": True}),
        Setting("size", "rank cut 0.05", {"rank_cut": 0.05}),
        Setting("size", "rank cut 0.2", {"rank_cut": 0.2}),
        Setting("size", "rank cut 0.3", {"rank_cut": 0.3}),
        Setting("size", "rank cut 0.5", {"rank_cut": 0.5}),
        Setting("size", "rows: half the share of error", patches=((_ROUNDING, "ROW_SHARE", 0.05),)),
        Setting("size", "predictor: half the share", patches=((_ROUNDING, "PREDICTOR_SHARE", 0.003),)),
        Setting("size", "token table: twice the share", patches=((_ROUNDING, "TABLE_SHARE", 0.006),)),
        Setting("rounding", "no reconstruction points", made=middle_points),
        Setting("rounding", "dead zone 0.4", made=spare, encoding=fast[0.4]),
        Setting("rounding", "dead zone 0.33", made=spare, encoding=fast[0.33]),
        Setting("rounding", "dead zone 0.33, tables anew", made=lambda b: counted_anew(b, 0.33), encoding=fast[0.33]),
        Setting("levels", "levels apart", made=spare, apart=True),
        Setting("levels", "levels apart, dead zone 0.4", made=spare, apart=True, encoding=fast[0.4]),
        Setting("levels", "levels apart, dead zone 0.33", made=spare, apart=True, encoding=fast[0.33]),
        Setting("no profile", "identity", identity=True, own_metric=True),
        Setting("no profile", "identity, heads turned", identity=True, turned=True, own_metric=True),
        Setting("default", "fitted on other windows", elsewhere=True, own_metric=True),
    ]  # fmt: skip


def fitted(bench: Bench, setting: Setting) -> tuple[Profile | None, float]:
    """The setting's profile, and the processor seconds of its fit; statistics not counted."""
    if setting.identity:
        return None, 0.0
    documents, caches, statistics = bench.documents, bench.caches, bench.statistics
    if setting.elsewhere:
        documents = bench.other_documents
        caches, statistics = bench.engine.prefill(documents), _statistics(bench.engine, documents)
    hidden = _hidden(bench.engine, documents, setting.prefix_layers)
    start = time.process_time()
    if setting.made:
        return setting.made(bench), time.process_time() - start
    given = setting.statistics(statistics) if setting.statistics else statistics
    with patched(setting.patches):
        profile = kvwire.fit_profile(caches, given, prefix_layers=setting.prefix_layers, hidden=hidden, **setting.fit)
    return profile, time.process_time() - start


def _statistics(engine: TransformersEngine, documents: list[list[int]]) -> Statistics:
    found = engine.statistics(documents)
    assert found is not None, "there are documents"
    return found


def _hidden(engine: TransformersEngine, documents: list[list[int]], layers: int) -> list[torch.Tensor] | None:
    return [engine.prefix_states(ids, layers) for ids in documents] if layers else None


def turn(cache: KVCache) -> KVCache:
    """Every head's keys, un-rotated, and values times an orthonormal Hadamard matrix: its own inverse."""

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        matrix = torch.ones(1, 1)
        while len(matrix) < tensor.shape[-1]:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return tensor @ (matrix / math.sqrt(len(matrix)))

    off = positions_off(cache)
    return replace(off, keys=[turned(each) for each in off.keys], values=[turned(each) for each in off.values])


def read(bench: Bench, setting: Setting, profile: Profile | None, window: Window) -> list[Reading]:
    """Every level of one window."""
    hidden = bench.engine.prefix_states(window.ids, setting.prefix_layers) if setting.prefix_layers else None
    cache = turn(window.cache) if setting.turned else window.cache
    whole = Ladder()
    each = [Ladder(step, (name,)) for step, name in zip(whole.steps, whole.names, strict=True)]
    out = []
    for ladder in each if setting.apart else [whole]:
        with patched(setting.encoding):
            blob = kvwire.encode(cache, profile, ladder, hidden=hidden, threads=1)
        info = kvwire.inspect(blob)
        for index, level in enumerate(info.levels):
            decoded = kvwire.decode(
                blob,
                index,
                profile,
                dtype=torch.float32,
                offset=None if setting.turned else 0,
                hidden=hidden,
                threads=1,
            )
            decoded = turn(decoded) if setting.turned else decoded
            point = compare(bench.engine, window.exact, decoded, level.name, level.bits_per_element)
            columns = sum(row[index].raw for row in info.segments) / info.tokens
            out.append(Reading(level.name, point.bits_per_element, point.kl, level.measured_error, columns))
    return out


def bits_at(curve: Curve, wanted: float) -> float | None:
    """Bits at which a curve of (bits, loss) has the loss wanted; its end pieces are drawn on up to ``_REACH``."""
    pairs = list(itertools.pairwise(sorted(curve)))
    inside = [pair for pair in pairs if pair[1][1] <= wanted <= pair[0][1]]
    worst, best = pairs[0][0][1], pairs[-1][1][1]
    if not inside and not best / _REACH <= wanted <= worst * _REACH:
        return None
    (few, worse), (many, better) = inside[0] if inside else pairs[0 if wanted > worst else -1]
    if worse <= better:
        return None
    share = math.log(worse / wanted) / math.log(worse / better)
    return few * math.exp(share * math.log(many / few))


def ratio(curve: Curve, reference: Curve) -> float | None:
    """Bits over the reference's at its own loss at the levels compared, geometric mean."""
    logs = []
    for bits, loss in (reference[level] for level in COMPARED):
        needed = bits_at(curve, loss)
        if needed is None:
            return None
        logs.append(math.log(needed / bits))
    return math.exp(stat.fmean(logs))


def mean_curve(found: list[list[Reading]], figure: str) -> Curve:
    """Mean bits and mean loss of each level over windows."""
    levels = list(zip(*found, strict=True))
    return [(stat.fmean(r.bits for r in row), stat.fmean(getattr(r, figure) for r in row)) for row in levels]


def relative(
    kinds: Sequence[str], found: list[list[Reading]], default: list[list[Reading]], figure: str
) -> dict[str, Any]:
    """Bits at equal loss over the default's: for each text, all texts, and the windows' spread about that."""
    texts: dict[str, float | None] = {}
    for kind in dict.fromkeys(kinds):
        mine, reference = (
            mean_curve([each for each, of in zip(readings, kinds, strict=True) if of == kind], figure)
            for readings in (found, default)
        )
        texts[kind] = ratio(mine, reference)
    known = [value for value in texts.values() if value is not None]
    single = [
        ratio(mean_curve([mine], figure), mean_curve([reference], figure))
        for mine, reference in zip(found, default, strict=True)
    ]
    logs = [math.log(each) for each in single if each is not None]
    return {
        "all": math.exp(stat.fmean(map(math.log, known))) if len(known) == len(texts) else None,
        "texts": texts,
        "windows": single,
        "standard_error": stat.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None,
    }


def report(
    bench: Bench, setting: Setting, profile: Profile | None, fit_s: float, default: list[list[Reading]] | None
) -> tuple[dict[str, Any], list[list[Reading]]]:
    """All figures of one setting, and its readings window by window."""
    found = [read(bench, setting, profile, window) for window in bench.windows]
    against = default or found
    kinds = [window.kind for window in bench.windows]
    levels = {
        row[0].level: {
            name: summary([getattr(r, name) for r in row]) | {"mean": stat.fmean(getattr(r, name) for r in row)}
            for name in ("bits", "kl", "error", "columns")
        }
        for row in zip(*found, strict=True)
    }
    size = len(profile.data) if profile is not None else 0
    elements = len(bench.windows[0].ids) * bench.windows[0].cache.meta.elements_per_token
    figures = {
        "section": setting.section,
        "profile_bytes": size,
        "profile_bits_per_element": {str(count): 8 * size / count / elements for count in DOCUMENTS},
        "rank": None if profile is None else profile.rank,
        "table_columns": None if profile is None else profile.token_features,
        "fit_s": fit_s,
        "levels": levels,
        "at_equal_kl": relative(kinds, found, against, "kl"),
        "at_equal_error": None if setting.own_metric else relative(kinds, found, against, "error"),
    }
    return figures, found


def cells(name: str, figures: dict[str, Any]) -> list[str]:
    """One row of the table."""
    fine = figures["levels"]["fine"]
    kl, error = figures["at_equal_kl"], figures["at_equal_error"]
    spread = "" if kl["standard_error"] is None else f"{kl['standard_error']:.3f}"
    return [
        name,
        _number(kl["all"]),
        spread,
        _number(error["all"]) if error else "",
        f"{fine['bits']['mean']:.4f}",
        f"{fine['kl']['mean']:.2e}",
        f"{fine['columns']['mean']:.0f}",
        f"{figures['profile_bytes'] / 1e6:.2f}",
        f"{figures['fit_s']:.0f}",
    ]


HEAD = ["setting", "equal KL", "+-", "equal error", "fine: bits", "fine: KL", "columns", "profile MB", "fit s"]


def _number(value: float | None) -> str:
    return "out of reach" if value is None else f"{value:.3f}"


def draw(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Bits at equal KL and at equal error over the default's, a line for each setting."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name, figures in found.items() if name != "default" and figures["at_equal_kl"]["all"]]
    figure, axes = plt.subplots(figsize=(8.5, 0.3 * len(names) + 1.3))
    for row, name in enumerate(names):
        kl, error = found[name]["at_equal_kl"], found[name]["at_equal_error"]
        reach = kl["all"] * (math.exp(kl["standard_error"] or 0.0) - 1)
        label = None if row else "equal KL, standard error over windows"
        axes.errorbar(kl["all"], row, xerr=reach, fmt="o", color="tab:blue", capsize=2, label=label)
        if error and error["all"]:
            axes.plot(error["all"], row, "x", color="tab:red")
    axes.plot([], [], "x", color="tab:red", label="equal measured error")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set(
        yticks=range(len(names)), yticklabels=names, xscale="log", xlabel="bits over the default's; left is better"
    )
    ticks = [0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5, 8, 12]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path.name}")


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "ablation")
    parser.add_argument("--text", type=Path, nargs="+", default=default_texts(), help="unseen texts to measure on")
    parser.add_argument("--contexts", type=int, default=1024, help="tokens in a cached context")
    parser.add_argument("--windows", type=int, default=3, help="contexts from each text")
    parser.add_argument("--calibration", type=int, default=16, help="windows that profiles are fitted on")
    parser.add_argument("--sections", nargs="+", help="only these; what --out holds of others stays, if measured alike")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no setting later than this")
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> Bench:
    """Run the model over everything that is needed of it."""
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    documents, others = (
        calibration(engine, args.fit, args.calibration, args.contexts, seed) for seed in (args.seed, args.seed + 1000)
    )
    held = []
    for path in args.text:
        for ids in windows(engine, path, args.windows, args.contexts + CONTINUATION + 1, args.seed):
            (cache,) = engine.prefill([ids[: args.contexts]])
            fed, targets = ids[args.contexts : -1], torch.tensor(ids[args.contexts + 1 :])[:, None]
            exact = Exact(predictions(engine, cache, fed, args.contexts), fed, targets, args.contexts)
            held.append(Window(path.stem, ids[: args.contexts], cache, exact))
    return Bench(engine, documents, engine.prefill(documents), _statistics(engine, documents), held, others)


def run(args: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Figures of every setting that is asked for, and the names of those that time did not allow."""
    started = time.monotonic()
    bench = prepare(args)
    first, *others = settings()
    profile, fit_s = fitted(bench, first)
    bench = replace(bench, default=profile)
    figures, default = report(bench, first, profile, fit_s, None)
    found, skipped = {first.name: figures}, []
    print("  ".join(cells(first.name, figures)), flush=True)
    for setting in others:
        if args.sections and setting.section not in args.sections:
            continue
        if time.monotonic() - started > 60 * args.minutes:
            skipped.append(setting.name)
            continue
        profile, fit_s = fitted(bench, setting)
        found[setting.name], _ = report(bench, setting, profile, fit_s, default)
        print("  ".join(cells(setting.name, found[setting.name])), flush=True)
    return found, skipped


def earlier(path: Path, shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results that a file holds already, where they were measured alike."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known: dict[str, dict[str, Any]] = document["results"]["settings"] if document.get("settings") == shared else {}
    return known


def main() -> None:
    """Fit, measure, print, save."""
    args = options()
    one_thread()
    shared = {
        "model": args.model.resolve().name,
        "seed": args.seed,
        "context_tokens": args.contexts,
        "continuation_tokens": CONTINUATION,
        "windows_per_text": args.windows,
        "calibration_windows": args.calibration,
        "levels_compared": [Ladder().names[level] for level in COMPARED],
        "exact": "float32",
    }
    found, skipped = run(args)
    found = (earlier(args.out, shared) if args.sections else {}) | found
    found = {setting.name: found[setting.name] for setting in settings() if setting.name in found}
    print("\n" + table(HEAD, [cells(name, figures) for name, figures in found.items()]))
    write_json(args.out, "ablation", shared, {"settings": found, "skipped": [n for n in skipped if n not in found]})
    draw(args.out.with_suffix(".png"), found)


if __name__ == "__main__":
    main()
