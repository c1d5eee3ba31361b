"""All that is estimated of one link and one engine, and how it is written down between runs."""

from __future__ import annotations

import pickle
from math import exp2, isfinite
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, to_builtins
from msgspec.structs import astuple

from kvwire._json import record
from kvwire.errors import ArgumentError

from .costs import CostModel, DecodeCost, PrefillCost
from .documents import LARGEST
from .estimators import MOST_KNOWN, UNKNOWN, BandwidthEstimator, RecentMedian
from .horizons import EDGES, HORIZONS_S, MOST_COUNTED, HorizonErrors, faded
from .learning import DecodeEstimator, JoinedEstimator, PrefillEstimator
from .snapshot import SLOWEST

if TYPE_CHECKING:
    from .estimators import BandwidthSettings

T = TypeVar("T", PrefillCost, DecodeCost)

STATE_VERSION = 1
_AGE_HALF_LIFE_S = 600.0  # a link measured an hour ago may be another by now
_ADVICE = "delete what was remembered; it is measured again"

_Seconds = Annotated[float, Meta(ge=0, le=LARGEST)]
_Error = Annotated[float, Meta(ge=0, le=LARGEST)]
_Known = Annotated[int, Meta(ge=0, le=MOST_KNOWN)]
_Count = Annotated[float, Meta(ge=0, le=MOST_COUNTED)]
_Counts = Annotated[list[_Count], Meta(min_length=len(EDGES), max_length=len(EDGES))]


class _PrefillRecord(Struct, forbid_unknown_fields=True):
    base_s: _Seconds
    token_s: _Seconds
    pair_s: _Seconds
    spread: _Error
    known: _Known


class _DecodeRecord(Struct, forbid_unknown_fields=True):
    base_s: _Seconds
    token_s: _Seconds
    byte_s: _Seconds
    spread: _Error
    known: _Known


class _EngineRecord(Struct, forbid_unknown_fields=True, omit_defaults=True):
    prefill: _PrefillRecord
    decode: _DecodeRecord
    link_s_per_token: _Seconds
    repair_scale: Annotated[float, Meta(ge=1 / LARGEST, le=LARGEST)] | UnsetType = UNSET  # later versions
    joined: _PrefillRecord | UnsetType = UNSET  # not every engine joins passes


class _LinkRecord(Struct, forbid_unknown_fields=True):
    bandwidth: Annotated[float, Meta(ge=SLOWEST, le=LARGEST)]
    bandwidth_error: _Error
    ttfb_s: _Seconds
    ttfb_spread: _Error
    horizons: dict[str, _Counts] | UnsetType = UNSET  # later versions

    def __post_init__(self) -> None:
        if self.horizons is not UNSET and self.horizons.keys() != _HORIZONS.keys():
            raise ValueError(f"horizons must be {', '.join(_HORIZONS)}")


_HORIZONS = {f"{seconds:g}": seconds for seconds in HORIZONS_S}


class _StateRecord(Struct, forbid_unknown_fields=True):
    version: Annotated[int, Meta(ge=STATE_VERSION, le=STATE_VERSION)]
    link: _LinkRecord | UnsetType = UNSET
    engine: _EngineRecord | UnsetType = UNSET


class Estimates:
    """Running estimates of a link and of an engine's costs; loads update them in place.

    Attributes:
        bandwidth: Of the link.
        ttfb: Of the link: seconds from a request to its first byte.
        prefill: Of the engine on its device.
        decode: Of the engine.
        closing: Of the engine: seconds for each prompt token of linking and handing the cache over.
        repair: Of the engine: what repairing prompts takes, over what passes of as many tokens should take.
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
        self.ttfb = RecentMedian(ttfb_prior_s)
        self.prefill = PrefillEstimator(costs.prefill)
        self.decode = DecodeEstimator(costs.decode)
        self.closing = RecentMedian(costs.link_s_per_token)
        self.repair = RecentMedian(1.0)
        self.use_joined(costs.joined)
        self._told: tuple[tuple[object, ...], CostModel] = (), costs

    def costs(self, query_tokens: int = 0) -> CostModel:
        """What computing costs by what is known now, for a question of that many tokens."""
        joined = self.joined.cost if self.joined else None
        parts = (self.prefill.cost, self.decode.cost, self.closing.value, query_tokens, self.repair.value, joined)
        if parts != self._told[0]:  # the same object as long as nothing changes
            prefill, decode, link_s, query, scale, _ = parts
            self._told = parts, CostModel(prefill, decode, link_s, query, repair_scale=scale, joined=joined)
        return self._told[1]

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
        ttfb = min(self.ttfb.value, LARGEST)
        spread = self.ttfb.deviation / ttfb if ttfb else UNKNOWN
        counts = ([round(count, 4) for count in row] for row in self.bandwidth.horizons.counts)
        link = _LinkRecord(
            bandwidth=min(max(self.bandwidth.usual, SLOWEST), LARGEST),
            bandwidth_error=min(self.bandwidth.error, LARGEST),
            ttfb_s=ttfb,
            ttfb_spread=min(spread, LARGEST),
            horizons=dict(zip(_HORIZONS, counts, strict=True)),
        )
        engine = _EngineRecord(
            prefill=_PrefillRecord(**_learnt(self.prefill)),
            decode=_DecodeRecord(**_learnt(self.decode)),
            link_s_per_token=min(self.closing.value, LARGEST),
            repair_scale=min(max(self.repair.value, 1 / LARGEST), LARGEST),
            joined=_PrefillRecord(**_learnt(self.joined)) if self.joined else UNSET,
        )
        state: dict[str, object] = to_builtins(_StateRecord(STATE_VERSION, link, engine))
        return state

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
        read = record(state, _StateRecord, "what was remembered of link and engine", _ADVICE)
        link, engine = read.link, read.engine
        if engine is not UNSET:
            costs = CostModel(
                _cost(PrefillCost, engine.prefill), _cost(DecodeCost, engine.decode), engine.link_s_per_token
            )
        if costs is None:
            raise ArgumentError("the state tells nothing of the engine; pass its costs")
        made = cls(costs, bandwidth_prior, ttfb_prior_s, settings=settings)
        if engine is not UNSET:
            made.prefill = PrefillEstimator(costs.prefill, **_trust(engine.prefill))
            made.decode = DecodeEstimator(costs.decode, **_trust(engine.decode))
            if engine.repair_scale is not UNSET:
                made.repair = RecentMedian(engine.repair_scale)
            if engine.joined is not UNSET:
                joined = _cost(PrefillCost, engine.joined)
                made.joined = JoinedEstimator(joined, made.prefill, **_trust(engine.joined))
        if link is not UNSET:
            horizons = None
            if link.horizons is not UNSET:
                counts = tuple(tuple(link.horizons[name]) for name in _HORIZONS)
                horizons = HorizonErrors(faded(counts, age_s / _AGE_HALF_LIFE_S))
            error = _aged(link.bandwidth_error, age_s)
            made.bandwidth = BandwidthEstimator(link.bandwidth, settings, prior_error=error, horizons=horizons)
            made.ttfb = RecentMedian(link.ttfb_s, _aged(link.ttfb_spread, age_s))
        return made


def _aged(error: float, age_s: float) -> float:
    """An error that grows with age beyond that of a prior of which nothing is known; a larger one stays."""
    weak = 2 * UNKNOWN  # reaches that of such a prior, which is then only a guess, after one half-life
    return max(error, weak + (error - weak) * exp2(-age_s / _AGE_HALF_LIFE_S))


def _learnt(estimator: PrefillEstimator | DecodeEstimator) -> dict[str, Any]:
    """Fields of a record."""
    coefficients = {name: min(value, LARGEST) for name, value in vars(estimator.cost).items()}
    return {**coefficients, "spread": min(estimator.spread, LARGEST), "known": estimator.known}


def _cost(kind: type[T], learnt: _PrefillRecord | _DecodeRecord) -> T:
    return kind(*astuple(learnt)[:3])


def _trust(learnt: _PrefillRecord | _DecodeRecord) -> dict[str, Any]:
    return {"spread": learnt.spread, "known": learnt.known}
