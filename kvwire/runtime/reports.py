"""What links and edited caches lose with a model, as measured on texts, and what loads do about edits."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple, Self

from kvwire._json import stored_record
from kvwire.errors import ArgumentError
from kvwire.reuse import SELECTORS, selector_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.reuse import Selector

DEFAULT_SELECTOR = "attention"
MEASURED_SELECTORS = ("attention", "blend", "cacheblend", "first")
"""Measured by ``kvwire check-model``: what ``auto`` chooses from."""
VERSION = 2
_READ = (1, 2)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INTERVAL = 3
_ADVICE = "run kvwire check-model again"
_BOUND = 0.1
"""Default bound: the share of the documents' whole effect that links may lose."""
GAIN_SHARE = 0.05
"""Share of rows, repaired by ``DEFAULT_SELECTOR``, at which a mean shift has to help."""


@dataclass(frozen=True)
class LinkReport:
    """Result of ``kvwire check-model``; KL divergences in nats, means over prompts and continuation tokens."""

    model_id: str  # of the model
    prompts: int  # number of prompts
    no_documents: float  # KL divergence of the question alone from a full prefill: the documents' whole effect
    linked: float  # KL divergence without repair
    linked_error: float  # standard error of ``linked`` over prompts
    shares: tuple[float, ...]  # repaired shares of rows, ascending, above 0
    repaired: dict[str, tuple[float, ...]]  # KL divergence at each share, by selector
    # KL divergence of linking a level without repair, by the level's name
    levels: dict[str, float] = field(default_factory=dict)
    # the same, with rows chosen on that level and repaired at ``repaired_share``
    levels_repaired: dict[str, float] = field(default_factory=dict)
    repaired_share: float = 0.0  # see ``levels_repaired``
    bound: float = _BOUND  # share of ``no_documents`` that links may lose
    shift: str = ""  # SHA-256 of the mean shift that loads add, if it helps; else empty
    shift_prompts: int = 0  # number of prompts that a mean shift was learnt from, helpful or not; 0: none was learnt
    # reduction of KL divergence by it at ``GAIN_SHARE`` of the rows, or without repair if the engine cannot: mean over
    # prompts, and its 95 % interval; empty if none was learnt
    shift_gain: tuple[float, ...] = ()
    shifted: float = 0.0  # ``linked`` with the mean shift
    shifted_repaired: dict[str, tuple[float, ...]] = field(default_factory=dict)  # ``repaired`` with it
    # most tokens of neutral texts before documents when they were computed; 0: they were computed alone
    neutral: int = 0

    def __post_init__(self) -> None:
        """Refuse invalid figures."""
        figures = (
            self.no_documents, self.linked, self.linked_error, self.repaired_share, self.bound, *self.shares,
            *(each for row in self.repaired.values() for each in row), *self.levels.values(),
            *self.levels_repaired.values(), self.shifted, self.shift_prompts,
            *(each for row in self.shifted_repaired.values() for each in row),
        )  # fmt: skip
        sound = all(isfinite(figure) and figure >= 0 for figure in figures) and all(map(isfinite, self.shift_gain))
        is_named = not self.shift or (_DIGEST.fullmatch(self.shift) and self.shift_gain and self.shift_prompts)
        sound = sound and bool(is_named) and len(self.shift_gain) in {0, _INTERVAL}
        told = (*self.repaired.values(), *self.shifted_repaired.values())
        rows = all(len(row) == len(self.shares) for row in told)
        grows = list(self.shares) == sorted(set(self.shares)) and all(0 < share <= 1 for share in self.shares)
        if not (sound and rows and grows and self.prompts > 0):
            raise ArgumentError(f"a report on links holds finite figures, at least 0, at growing shares: {_ADVICE}")

    def with_shift(self) -> Self:
        """Figures with the mean shift; unchanged if loads add none."""
        return replace(self, linked=self.shifted, repaired=self.shifted_repaired) if self.shift else self

    @property
    def allowed(self) -> float:
        """Allowed KL divergence of links."""
        return self.bound * self.no_documents

    @property
    def is_within(self) -> bool:
        """Whether links need no repair."""
        return self.linked <= self.allowed

    def least_share(self, selector: str) -> float | None:
        """Least measured share at which links are within the bound."""
        if self.is_within:
            return 0.0
        row = self.repaired.get(selector, ())
        return next((share for share, kl in zip(self.shares, row, strict=False) if kl <= self.allowed), None)

    def best_selector(self, layers: int) -> str:
        """Selector for this model: of those that get links within the bound, the one that computes least."""
        known = [name for name in self.repaired if name in SELECTORS]  # a later version may have others
        if not known:
            return DEFAULT_SELECTOR
        shares = {name: self.least_share(name) for name in known}
        enough = {name: share for name, share in shares.items() if share is not None}
        if not enough:
            return min(known, key=lambda name: self.left(name)[-1])
        if not any(enough.values()):  # no repair is needed: take the most gain per computation
            return min(enough, key=lambda name: self.left(name)[-1] + self.allowed * scan_of(selector_of(name), layers))
        return min(enough, key=lambda name: (enough[name] or 0.0) + scan_of(selector_of(name), layers))

    def left(self, selector: str) -> tuple[float, ...]:
        """KL divergence without repair and at each share, made monotone."""
        out = [self.linked]
        for kl in self.repaired.get(selector, ()):
            out.append(min(out[-1], kl))
        return tuple(out)

    def to_json(self) -> bytes:
        """Serialise for the store; ``of_json`` reads it."""
        return json.dumps({"version": VERSION, **asdict(self)}, allow_nan=False).encode()

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Parse ``to_json``."""
        return stored_record(data, cls, "the report on links", _ADVICE, _READ)


def scan_of(selector: Selector, layers: int) -> float:
    """Cost of a selector's choice as a share of a prefill, without the question's pass."""
    tokens = 1000
    return min(1.0, selector.cost(tokens, 0, 0, layers).token_layers / (tokens * layers)) if layers else 0.0


_EDIT_VERSION = 1
EDIT_BOUND = 0.05
"""Of what the donor's own cache is wrong by: edits that are wrong by no more, at any share, are safe."""
UNMEASURED_EDIT_SHARE = 0.15
"""Of the rows, computed anew where edits were not measured."""
_EDIT_ADVICE = "run kvwire check-model --edits again"


class EditRepair(NamedTuple):
    """Which rows edits compute anew beside holes, and what is known of the error that is left.

    Attributes:
        share: Of the prompt's rows.
        selector: Name of what chooses them.
        curve: Shares of edited tokens, growing, and the KL divergence at each; empty: nobody measured.
        is_safe: Edits were measured, and lose no more than the bound.
    """

    share: float
    selector: str
    curve: tuple[tuple[float, float], ...] = ()
    is_safe: bool = False

    def error(self, edited: float) -> float | None:
        """KL divergence to expect where such a share of tokens is edited: that of the next larger one."""
        known = [kl for share, kl in self.curve if share >= edited] or [kl for _, kl in self.curve[-1:]]
        return known[0] if known else None


@dataclass(frozen=True)
class EditReport:
    """What ``kvwire check-model --edits`` measured; KL divergences from a full prefill in nats, means over prompts.

    Attributes:
        model_id: Of the model.
        prompts: How many were measured at each share of edited tokens.
        edited: Shares of tokens that were edited, growing.
        donor: KL divergence of the donor's own cache, at each of these.
        holes: That of an edited cache of which holes alone are computed.
        shares: Shares of rows that were computed anew beside them, growing.
        repaired: By selector, at each of ``shares``: KL divergences at each of ``edited``.
        bound: Of ``donor``: what edits may lose.
    """

    model_id: str
    prompts: int
    edited: tuple[float, ...]
    donor: tuple[float, ...]
    holes: tuple[float, ...]
    shares: tuple[float, ...]
    repaired: dict[str, tuple[tuple[float, ...], ...]]
    bound: float = EDIT_BOUND

    def __post_init__(self) -> None:
        """Refuse figures that cannot be."""
        rows = [self.donor, self.holes, *(row for rows in self.repaired.values() for row in rows)]
        sound = all(isfinite(each) and each >= 0 for row in (*rows, (self.bound,)) for each in row)
        grows = all(
            list(each) == sorted(set(each)) and all(0 < x <= 1 for x in each) for each in (self.edited, self.shares)
        )
        sized = all(len(row) == len(self.edited) for row in rows)
        sized = sized and all(len(each) == len(self.shares) for each in self.repaired.values())
        if not (sound and grows and sized and self.edited and self.shares and self.prompts > 0):
            msg = f"a report on edits holds finite figures, at least 0, at growing shares: {_EDIT_ADVICE}"
            raise ArgumentError(msg)

    def is_within(self, row: Sequence[float]) -> bool:
        """Whether KL divergences are within the bound, at every share of edited tokens."""
        return all(kl <= self.bound * donor for kl, donor in zip(row, self.donor, strict=True))

    def choose(self, layers: int, share: float | None = None, selector: str = "") -> EditRepair:
        """What loads do: the least that is within the bound, else the most that was measured, and what that loses.

        share: of rows that was asked for; None: as said. selector: that was asked for; empty: any.
        """
        alone = (0.0, selector or DEFAULT_SELECTOR, self.holes)
        options = [alone] if share == 0 or (share is None and self.is_within(self.holes)) else []
        nearest = min(self.shares, key=lambda each: (each > (share or 0.0), abs(each - (share or 0.0))))
        for name in self.repaired if share != 0 else ():
            if name in SELECTORS and selector in {"", name}:
                measured = zip(self.shares, self.repaired[name], strict=True)
                options += [(share or rows, name, row) for rows, row in measured if share is None or rows == nearest]
        if not options:
            return EditRepair(UNMEASURED_EDIT_SHARE if share is None else share, selector or DEFAULT_SELECTOR)
        good = [each for each in options if self.is_within(each[2])]
        if good:
            best = min(good, key=lambda each: each[0] + (each[0] > 0) * scan_of(selector_of(each[1]), layers))
        else:
            best = min(options, key=lambda each: sum(each[2]))
        return EditRepair(best[0], best[1], tuple(zip(self.edited, best[2], strict=True)), bool(good))

    def to_json(self) -> bytes:
        """As it is stored; ``of_json`` reads it."""
        return json.dumps({"version": _EDIT_VERSION, **asdict(self)}, allow_nan=False).encode()

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Read what ``to_json`` wrote."""
        return stored_record(data, cls, "the report on edits", _EDIT_ADVICE, [_EDIT_VERSION])


def edit_repair(report: EditReport | None, repair: str | float, selector: str, layers: int) -> EditRepair:
    """What loads do about the stale rows of an edited cache, by their settings and by what was measured, if it was."""
    name = "" if selector == "auto" else selector
    share = {"auto": None, "none": 0.0, "all": 1.0}[repair] if isinstance(repair, str) else float(repair)
    if report is not None:
        return report.choose(layers, share, name)
    return EditRepair(UNMEASURED_EDIT_SHARE if share is None else share, name or DEFAULT_SELECTOR)
