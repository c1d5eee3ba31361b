"""Report on the loss of linking, measured for a model on texts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Self

from kvwire._json import versioned_record
from kvwire.errors import ArgumentError
from kvwire.reuse import SELECTORS, selector_of

if TYPE_CHECKING:
    from kvwire.reuse import Selector

DEFAULT_SELECTOR = "attention"
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
        return versioned_record(data, cls, "the report on links", _ADVICE, _READ)


def scan_of(selector: Selector, layers: int) -> float:
    """Cost of a selector's choice as a share of a prefill, without the question's pass."""
    tokens = 1000
    return min(1.0, selector.cost(tokens, 0, 0, layers).token_layers / (tokens * layers)) if layers else 0.0
