"""Convert a profile's groups to the arrays of its file and back; see docs/format.md, section 3.2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvwire.codec.backend import SIDES
from kvwire.codec.format.arrays import typed
from kvwire.codec.profile.group import (
    MOST_PIECES,
    Factor,
    Group,
    QuantisedMatrix,
    RoundedMatrices,
    pieces,
    unzigzag,
    wide_rows,
    zigzag,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from kvwire.codec.backend import Plane
    from kvwire.codec.format.arrays import Arrays
    from kvwire.types import LayerSpec

_STEEPEST_ROW = 120
"""Largest power of two that scales a row, within bfloat16's range."""
_MATRIX = 2
LARGEST_HEAD = 4096
"""Most elements of a head whose metric is multiplied out; real heads have some hundreds."""


def arrays_of(group: Group) -> Arrays:
    """Return a group's arrays by name."""
    small = bool((np.abs(group.mean) <= np.finfo(np.float16).max).all())
    half = group.mean.astype(np.float16) if small else None
    exact = half is not None and np.array_equal(half.astype(np.float32), group.mean)
    named: Arrays = {"mean": half if half is not None and exact else group.mean, "spread": group.spread}
    if len(group.sink):
        named |= {"sink": group.sink, "sink_steps": group.sink_steps}
    if group.row_scale is not None:
        named["row_scale"] = group.row_scale
    if group.rows is None:
        return named
    if is_rounded(group) and group.rounded is not None:
        return named | _rounded_arrays(group, group.rounded)
    named |= _stored_rows(group.rows)
    if group.predictor is not None:
        named["predictor"] = bits_of(group.predictor)
    return named | {f"metric{number}": block for number, block in enumerate(group.metric)}


def is_rounded(group: Group) -> bool:
    """Return whether a group's matrices equal its rounded ones."""
    known = group.rounded
    if known is None or group.rows is None or (known.predictor is None) != (group.predictor is None):
        return False
    if group.predictor is not None and known.predictor is not None:
        if known.predictor.entries.shape != group.predictor.shape:
            return False
        if not torch.equal(known.predictor.values(), group.predictor):
            return False
    if known.rows.entries.shape != group.rows.shape or len(known.factors) != len(group.metric):
        return False
    pairs = zip(known.factors, group.metric, strict=True)
    alike = all(factor is None or np.array_equal(factor.metric, block) for factor, block in pairs)
    return alike and torch.equal(known.rows.values(), group.rows)


def _rounded_arrays(group: Group, known: RoundedMatrices) -> Arrays:
    rows = known.rows
    named: Arrays = {"rows_steps": rows.row_steps, "rows_columns": rows.column_steps}
    for number, (first, last) in enumerate(pieces(group.cuts, group.rank)):
        named |= _by_width(f"rows{number}", rows.entries[first:last])
    if known.predictor is not None:
        steps = {"predictor_steps": known.predictor.row_steps, "predictor_columns": known.predictor.column_steps}
        named |= _by_width("predictor", known.predictor.entries) | steps
    for number, (factor, block) in enumerate(zip(known.factors, group.metric, strict=True)):
        named[f"metric{number}"] = block if factor is None else factor.entries
        if factor is not None:
            named[f"metric{number}_steps"] = factor.steps
    return named


def _by_width(name: str, entries: NDArray[np.int16]) -> Arrays:
    """Store rows up to the last with large entries in two bytes per entry, the others in one."""
    wide = wide_rows(entries)
    named: Arrays = {name: entries[wide:].astype(np.int8)}
    return named | ({f"{name}_wide": zigzag(entries[:wide])} if wide else {})


def _stored_rows(rows: torch.Tensor) -> Arrays:
    """Return rows as int8 with a power of two per row where that is exact, else as bfloat16."""
    exponent = torch.frexp(rows.float().abs().amax(1))[1] - 7
    scaled = torch.ldexp(rows.float(), -exponent[:, None])
    eighth = scaled.round().clamp(-127, 127)
    if torch.equal(eighth, scaled):
        return {"rows": eighth.to(torch.int8).numpy(), "row_exponent": exponent.to(torch.int16).numpy()}
    return {"rows": bits_of(rows)}


def bits_of(tensor: torch.Tensor) -> NDArray[np.uint16]:
    """View a bfloat16 tensor's bits."""
    bits: NDArray[np.uint16] = tensor.contiguous().view(torch.uint16).numpy()
    return bits


def group_of(index: int, raw: Any, arrays: Arrays, *, layers: tuple[LayerSpec, ...]) -> Group:  # noqa: ANN401 - JSON
    """Read a group."""
    own, planes = own_arrays(index, arrays), planes_of_json(raw)
    try:
        return _group(index, planes, own, layers)
    except KeyError as error:
        raise KeyError(f"g{index}." + error.args[0]) from error


def own_arrays(index: int, arrays: Arrays) -> Arrays:
    """Return a group's arrays under their names without prefix."""
    prefix = f"g{index}."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _group(index: int, planes: tuple[Plane, ...], own: Arrays, layers: tuple[LayerSpec, ...]) -> Group:
    identity = "rows" not in own and "rows_steps" not in own
    if identity and ("metric0" in own or "predictor" in own):
        raise ValueError(f"group {index} has a metric or a predictor and no rows")
    mean, spread = typed(own["mean"], "f2", "f4").astype(np.float32), typed(own["spread"], "i2")
    if identity:
        return Group(planes, mean, spread, None, typed(own["row_scale"], "f4"), (), None, None, (), *sink_of(own))
    if "rows_steps" in own:
        return _rounded_group(planes, mean, spread, own, layers)
    metric = tuple(typed(own[f"metric{number}"], "f4") for number in range(len(planes)))
    predictor = _bfloat16(own["predictor"]) if "predictor" in own else None
    return Group(planes, mean, spread, _rows(own), None, metric, predictor, None, (), *sink_of(own))


def _rounded_group(
    planes: tuple[Plane, ...],
    mean: NDArray[np.float32],
    spread: NDArray[np.int16],
    own: Arrays,
    layers: tuple[LayerSpec, ...],
) -> Group:
    rows, ends = _rows_in_pieces(own)
    predictor = predictor_of(own)
    if rows.entries.shape != (spread.size, mean.size) or (predictor and predictor.entries.shape[1] != mean.size):
        raise ValueError("matrices of another shape than the mean and the spread")
    factors, metric = metric_of(planes, own, layers)
    known = RoundedMatrices(rows, predictor, factors)
    values = None if predictor is None else predictor.values()
    return Group(planes, mean, spread, rows.values(), None, metric, values, known, tuple(ends[:-1]), *sink_of(own))


def sink_of(own: Arrays) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Read the row of attention sinks and its steps; both empty where there is none."""
    if "sink" not in own and "sink_steps" not in own:
        return np.empty(0, np.float32), np.empty(0, np.float32)
    sink, steps = typed(own["sink"], "f4"), typed(own["sink_steps"], "f4")
    if not sink.size:
        raise ValueError("a row of attention sinks without elements")
    return sink, steps


def metric_of(
    planes: tuple[Plane, ...], own: Arrays, layers: tuple[LayerSpec, ...]
) -> tuple[tuple[Factor | None, ...], tuple[NDArray[np.float32], ...]]:
    """Read the metric of a group with rounded matrices, as factors and multiplied out."""
    factors: list[Factor | None] = []
    metric: list[NDArray[np.float32]] = []
    for number, plane in enumerate(planes):
        block, steps = own[f"metric{number}"], own.get(f"metric{number}_steps")
        factor = None if steps is None else _factor(typed(block, "i1"), steps_of(steps, _MATRIX), plane, layers)
        factors.append(factor)
        metric.append(typed(block, "f4") if factor is None else factor.metric)
    return tuple(factors), tuple(metric)


def predictor_of(own: Arrays) -> QuantisedMatrix | None:
    """Read the predictor of a group with rounded matrices; None where it has none."""
    return _quantised_matrix("predictor", own) if "predictor" in own else None


def _rows_in_pieces(own: Arrays) -> tuple[QuantisedMatrix, list[int]]:
    """Read all rows and the ends of their pieces; files without sections have one piece without a number."""
    if "rows" in own:
        return _quantised_matrix("rows", own), []
    parts = [entries_of(f"rows{number}", own) for number in range(count_pieces(own))]
    if not parts:
        raise KeyError("rows0")
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return _with_steps("rows", np.concatenate(parts), own), ends


def count_pieces(names: Collection[str]) -> int:
    """Count the pieces of a group's rows."""
    return next(number for number in range(MOST_PIECES + 1) if f"rows{number}" not in names)


def _factor(
    entries: NDArray[np.int8], steps: NDArray[np.float32], plane: Plane, layers: tuple[LayerSpec, ...]
) -> Factor:
    side, layer = plane
    spec = layers[layer] if 0 <= layer < len(layers) else None
    shape = None if spec is None else (spec.kv_heads, spec.key_dim if side == "key" else spec.value_dim)
    if steps.shape != shape or steps.shape[1] > LARGEST_HEAD:
        raise ValueError(f"a metric of {side}s has another shape than those of layer {layer}")
    return Factor(entries, steps)


def _quantised_matrix(name: str, own: Arrays) -> QuantisedMatrix:
    return _with_steps(name, entries_of(name, own), own)


def entries_of(name: str, own: Arrays) -> NDArray[np.int16]:
    """Read a matrix's entries, wide rows first."""
    entries: NDArray[np.int16] = typed(own[name], "i1").astype(np.int16)
    if (wide := own.get(f"{name}_wide")) is None:
        return entries
    large = typed(wide, "i2", "u2")
    return np.concatenate([unzigzag(large) if large.dtype == np.uint16 else large, entries])


def _with_steps(name: str, entries: NDArray[np.int16], own: Arrays) -> QuantisedMatrix:
    matrix = QuantisedMatrix(entries, steps_of(own[f"{name}_steps"], 1), steps_of(own[f"{name}_columns"], 1))
    if entries.shape != (len(matrix.row_steps), len(matrix.column_steps)):
        raise ValueError(f"{name} without fitting steps")
    return matrix


def steps_of(array: NDArray[np.generic], ndim: int) -> NDArray[np.float32]:
    """Read steps; raises ValueError unless they are finite and positive."""
    steps: NDArray[np.float32] = typed(array, "f4")
    if steps.ndim != ndim or not bool((np.isfinite(steps) & (steps > 0)).all()):
        raise ValueError("steps that are not finite and positive")
    return steps


def planes_of_json(raw: Any) -> tuple[Plane, ...]:  # noqa: ANN401 - JSON
    """Read a group's planes."""
    return tuple(_plane(each) for each in raw)


def _plane(raw: Any) -> Plane:  # noqa: ANN401 - JSON
    side, layer = raw
    if side not in SIDES or type(layer) is not int:
        raise ValueError(f"plane {raw!r}")
    return side, layer


def _bfloat16(array: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(typed(array, "u2")).view(torch.bfloat16)


def _rows(own: Arrays) -> torch.Tensor:
    raw = own["rows"]
    if raw.dtype != np.int8:
        return _bfloat16(raw)
    exponent = torch.from_numpy(typed(own["row_exponent"], "i2"))
    if exponent.ndim != 1 or len(exponent) != len(raw) or bool((exponent.int().abs() > _STEEPEST_ROW).any()):
        raise ValueError("rows without fitting exponents")
    rows = torch.from_numpy(typed(raw, "i1")).float()
    return torch.ldexp(rows, exponent.reshape(-1, *([1] * (rows.ndim - 1)))).bfloat16()
