"""All that is estimated of one link and one engine, and how it is written down between runs."""

from __future__ import annotations

import pickle
from math import exp2, isfinite
from typing import TYPE_CHECKING, Self

from kvwire.errors import ArgumentError, CorruptError

from .costs import CostModel, DecodeCost, PrefillCost
from .estimators import BandwidthEstimator, TtfbEstimator
from .horizons import EDGES, HORIZONS_S, MOST_COUNTED, HorizonErrors, faded
from .learning import (
    MOST_KNOWN,
    ClosingEstimator,
    DecodeEstimator,
    JoinedEstimator,
    PrefillEstimator,
    RepairEstimator,
)

if TYPE_CHECKING:
    from .estimators import BandwidthSettings

STATE_VERSION = 1
_AGE_HALF_LIFE_S = 600.0  # a link measured an hour ago may be another by now
_WEAK_ERROR = 1.0  # of such a link's bandwidth
_WEAK_SPREAD = 0.5  # of its time to first byte
_SLOWEST, _FASTEST = 1e3, 1e13  # bytes per second; a link slower than that was dead, not slow
_LONGEST_S = 3600.0
_LARGEST_ERROR = 10.0
_LEAST_SCALE, _LARGEST_SCALE = 1e-3, 1e3
_ENGINE = ("prefill", "decode", "link_s_per_token")
_LATER = ("repair_scale", "joined")  # older versions wrote none, and not every engine joins passes
_LINK = ("bandwidth", "bandwidth_error", "ttfb_s", "ttfb_spread")
_DIGITS = 4  # of a count
_PREFILL = ("base_s", "token_s", "pair_s")
_DECODE = ("base_s", "token_s", "byte_s")
_ADVICE = "delete what was remembered; it is measured again"


class Estimates:
    """Running estimates of a link and of an engine's costs; loads update them in place.

    Attributes:
        bandwidth: Of the link.
        ttfb: Of the link.
        prefill: Of the engine on its device.
        decode: Of the engine.
        closing: Of the engine.
        repair: Of the engine.
        joined: Of the engine; None where it extends caches one by one.
    """

    joined: JoinedEstimator | None

    def __init__(
        self,
        costs: CostModel,
        bandwidth_prior: float,
        ttfb_prior_s: float,
        *,
        settings: BandwidthSettings | None = None,
    ) -> None:
        """Start from priors: costs, bytes per second and seconds to the first byte.

        Args:
            costs: What computing costs.
            bandwidth_prior: Bytes per second that are assumed.
            ttfb_prior_s: Seconds to the first byte that are assumed.
            settings: How quickly the bandwidth follows the link.
        """
        self.bandwidth = BandwidthEstimator(bandwidth_prior, settings)
        self.ttfb = TtfbEstimator(ttfb_prior_s)
        self.prefill = PrefillEstimator(costs.prefill)
        self.decode = DecodeEstimator(costs.decode)
        self.closing = ClosingEstimator(costs.link_s_per_token)
        self.repair = RepairEstimator()
        self.use_joined(costs.joined)
        self._told = CostModel(costs.prefill, costs.decode)

    def costs(self, query_tokens: int = 0) -> CostModel:
        """What computing costs by what is known now, for a question of that many tokens."""
        prefill, decode, link_s = self.prefill.cost, self.decode.cost, self.closing.link_s_per_token
        told, scale = self._told, self.repair.scale
        joined = self.joined.cost if self.joined else None
        if not (
            told.prefill is prefill
            and told.decode is decode
            and told.link_s_per_token == link_s
            and told.query_tokens == query_tokens
            and told.repair_scale == scale
            and told.joined is joined
        ):
            told = self._told = CostModel(prefill, decode, link_s, query_tokens, repair_scale=scale, joined=joined)
        return told

    def use_joined(self, cost: PrefillCost | None) -> None:
        """Begin anew with what passes of several loads cost."""
        self.joined = JoinedEstimator(cost, self.prefill) if cost else None

    def copy(self) -> Self:
        """Estimates that know the same and learn apart."""
        copied: Self = pickle.loads(pickle.dumps(self))  # noqa: S301 - our own; a third of what deepcopy takes
        return copied

    @property
    def knows_link(self) -> bool:
        """Whether anything was measured of the link since the priors."""
        return self.bandwidth.is_measured or self.ttfb.is_measured

    @property
    def knows_engine(self) -> bool:
        """Whether anything was measured of the engine since the priors."""
        return self.prefill.is_measured or self.decode.is_measured or self.closing.is_measured

    def to_state(self) -> dict[str, object]:
        """What ``of_state`` reads, as plain JSON: ``version``, ``link`` and ``engine``."""
        ttfb = min(self.ttfb.value, _LONGEST_S)
        spread = self.ttfb.deviation / ttfb if ttfb else _WEAK_SPREAD
        prefill, decode = self.prefill.cost, self.decode.cost
        joined = {}
        if self.joined:
            cost = self.joined.cost
            joined["joined"] = _learnt(self.joined, (cost.base_s, cost.token_s, cost.pair_s), _PREFILL)
        return {
            "version": STATE_VERSION,
            "link": {
                "bandwidth": min(max(self.bandwidth.usual, _SLOWEST), _FASTEST),
                "bandwidth_error": min(self.bandwidth.error, _LARGEST_ERROR),
                "ttfb_s": ttfb,
                "ttfb_spread": min(spread, _LARGEST_ERROR),
                "horizons": {
                    f"{seconds:g}": [round(count, _DIGITS) for count in row]
                    for seconds, row in zip(HORIZONS_S, self.bandwidth.horizons.counts, strict=True)
                },
            },
            "engine": {
                "prefill": _learnt(self.prefill, (prefill.base_s, prefill.token_s, prefill.pair_s), _PREFILL),
                "decode": _learnt(self.decode, (decode.base_s, decode.token_s, decode.byte_s), _DECODE),
                "link_s_per_token": min(self.closing.link_s_per_token, _LONGEST_S),
                "repair_scale": min(max(self.repair.scale, _LEAST_SCALE), _LARGEST_SCALE),
                **joined,
            },
        }

    @classmethod
    def of_state(
        cls,
        state: object,
        costs: CostModel | None,
        bandwidth_prior: float,
        ttfb_prior_s: float,
        *,
        age_s: float = 0.0,
        settings: BandwidthSettings | None = None,
    ) -> Self:
        """Make estimates that start where others were.

        Args:
            state: From ``to_state``; ``link`` or ``engine`` may be missing, then the priors hold. An engine's costs
                stay; a link's are trusted the less the older they are.
            costs: What computing costs; None where the state has an engine.
            bandwidth_prior: Bytes per second that are assumed.
            ttfb_prior_s: Seconds to the first byte that are assumed.
            age_s: Seconds since the state was saved.
            settings: How quickly the bandwidth follows the link.

        Returns:
            New estimates.

        Raises:
            CorruptError: The state was never written.
            ArgumentError: Priors are wrong, or there are none.
        """
        if not (isfinite(age_s) and age_s >= 0):
            raise ArgumentError(f"an age must be a finite number of seconds, at least 0, got {age_s}")
        parts = _parts(state)
        engine = _Engine(parts["engine"]) if "engine" in parts else None
        known = engine.costs if engine else costs
        if known is None:
            raise ArgumentError("the state tells nothing of the engine; pass its costs")
        made = cls(known, bandwidth_prior, ttfb_prior_s, settings=settings)
        if engine:
            made.prefill, made.decode, made.repair = engine.prefill, engine.decode, engine.repair
            made.joined = engine.joined
        if "link" in parts:
            link = _link(parts["link"])
            bandwidth = link.number("bandwidth", _FASTEST, _SLOWEST)
            error = _aged(link.number("bandwidth_error", _LARGEST_ERROR), _WEAK_ERROR, age_s)
            horizons = _horizons(link, age_s)
            made.bandwidth = BandwidthEstimator(bandwidth, settings, prior_error=error, horizons=horizons)
            spread = _aged(link.number("ttfb_spread", _LARGEST_ERROR), _WEAK_SPREAD, age_s)
            made.ttfb = TtfbEstimator(link.number("ttfb_s", _LONGEST_S), spread)
        return made


class _Engine:
    """Costs of an engine, read from a state."""

    def __init__(self, part: object) -> None:
        later = [name for name in _LATER if isinstance(part, dict) and name in part]
        fields = _Fields(part, "engine", (*_ENGINE, *later))
        prefill, spread, known = _read_learnt(fields.values["prefill"], "prefill", _PREFILL)
        self.prefill = PrefillEstimator(PrefillCost(*prefill), spread=spread, known=known)
        decode, spread, known = _read_learnt(fields.values["decode"], "decode", _DECODE)
        self.decode = DecodeEstimator(DecodeCost(*decode), spread=spread, known=known)
        scaled = "repair_scale" in later
        self.repair = RepairEstimator(fields.number("repair_scale", _LARGEST_SCALE, _LEAST_SCALE) if scaled else 1.0)
        self.joined: JoinedEstimator | None = None
        if "joined" in later:
            joined, spread, known = _read_learnt(fields.values["joined"], "joined", _PREFILL)
            self.joined = JoinedEstimator(PrefillCost(*joined), self.prefill, spread=spread, known=known)
        self.costs = CostModel(self.prefill.cost, self.decode.cost, fields.number("link_s_per_token", _LONGEST_S))


class _Fields:
    """A JSON object with exactly these names; raises CorruptError where it is not."""

    def __init__(self, part: object, what: str, names: tuple[str, ...]) -> None:
        if not isinstance(part, dict) or set(part) != set(names):
            raise CorruptError(f"the remembered {what} must be an object of {', '.join(names)}; {_ADVICE}")
        self.values: dict[str, object] = part
        self._what = what

    def number(self, name: str, most: float, least: float = 0.0) -> float:
        """A finite number between two bounds."""
        return self._checked(name, self.values[name], most, least)

    def row(self, name: str, length: int, most: float) -> tuple[float, ...]:
        """A list of so many finite numbers from 0 on."""
        values = self.values[name]
        if not isinstance(values, list) or len(values) != length:
            raise CorruptError(f"{name} of the remembered {self._what} must be a list of {length} numbers; {_ADVICE}")
        return tuple(self._checked(name, value, most, 0.0) for value in values)

    def _checked(self, name: str, value: object, most: float, least: float) -> float:
        # Compared before it is converted: an integer may be too large for a float. NaN compares false.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            msg = f"{name} of the remembered {self._what} must be a number from {least:g} to {most:g}; {_ADVICE}"
            raise CorruptError(msg)
        return float(value)


def _parts(state: object) -> dict[str, object]:
    if not isinstance(state, dict) or not set(state) <= {"version", "link", "engine"}:
        raise CorruptError(f"remembered estimates must be an object of version, link and engine; {_ADVICE}")
    version = state.get("version")
    if version != STATE_VERSION or isinstance(version, bool):
        raise CorruptError(f"the remembered estimates are not of version {STATE_VERSION}; {_ADVICE}")
    return state


def _link(part: object) -> _Fields:
    """What is remembered of a link; older versions wrote nothing of its errors over longer horizons."""
    known = isinstance(part, dict) and "horizons" in part
    return _Fields(part, "link", (*_LINK, "horizons") if known else _LINK)


def _horizons(link: _Fields, age_s: float) -> HorizonErrors | None:
    if "horizons" not in link.values:
        return None
    names = tuple(f"{seconds:g}" for seconds in HORIZONS_S)
    fields = _Fields(link.values["horizons"], "errors of the link", names)
    counts = tuple(fields.row(name, len(EDGES), MOST_COUNTED) for name in names)
    return HorizonErrors(faded(counts, age_s / _AGE_HALF_LIFE_S))


def _learnt(
    estimator: PrefillEstimator | DecodeEstimator, coefficients: tuple[float, float, float], names: tuple[str, ...]
) -> dict[str, float]:
    state = {name: min(value, _LONGEST_S) for name, value in zip(names, coefficients, strict=True)}
    return {**state, "spread": min(estimator.spread, _LARGEST_ERROR), "known": estimator.known}


def _read_learnt(part: object, what: str, names: tuple[str, ...]) -> tuple[list[float], float, int]:
    fields = _Fields(part, what, (*names, "spread", "known"))
    coefficients = [fields.number(name, _LONGEST_S) for name in names]
    return coefficients, fields.number("spread", _LARGEST_ERROR), int(fields.number("known", MOST_KNOWN))


def _aged(error: float, weak: float, age_s: float) -> float:
    """An error that grows with age to that of a weak prior, which a larger one is already."""
    return error if error >= weak else weak + (error - weak) * exp2(-age_s / _AGE_HALF_LIFE_S)
