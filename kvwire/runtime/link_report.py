"""How much linked documents lose by not seeing each other, as measured for a model and texts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

from kvwire._json import strict_json
from kvwire.errors import ArgumentError, CorruptError
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
"""Of what documents tell a question at all: links that lose no more are fine."""
GAIN_SHARE = 0.05
"""Of the rows, computed anew as ``DEFAULT_SELECTOR`` chooses them, where a link shift has to help."""


@dataclass(frozen=True)
class LinkReport:
    """What ``kvwire check-model`` measured; KL divergences in nats, means over prompts and the tokens that follow.

    Attributes:
        model_id: Of the model.
        prompts: How many were measured.
        no_documents: KL divergence of the question alone from a full prefill: all that documents tell.
        linked: KL divergence of documents that do not see each other.
        linked_error: Standard error of ``linked`` over prompts.
        shares: Shares of rows that were repaired, growing, above 0.
        repaired: By selector: KL divergence at each share.
        levels: By name of a level: KL divergence of linking it without repair.
        levels_repaired: By name of a level: the same, chosen on that level and repaired at ``repaired_share``.
        repaired_share: See there.
        bound: Of ``no_documents``: what links may lose.
        shift: SHA-256 of the link shift that loads add, as it helps; empty where there is none.
        shift_prompts: How many prompts a shift was learnt from, whether it helps or not; 0: none was learnt.
        shift_gain: KL divergence that it takes away at ``GAIN_SHARE`` of the rows, or without repair where the engine
            cannot: mean over prompts, and its 95 % interval; empty where none was learnt.
        shifted: ``linked`` with the shift that was learnt.
        shifted_repaired: ``repaired`` with it.
        neutral: Tokens of neutral texts, at most, that documents were computed behind; 0: they were computed alone.
    """

    model_id: str
    prompts: int
    no_documents: float
    linked: float
    linked_error: float
    shares: tuple[float, ...]
    repaired: dict[str, tuple[float, ...]]
    levels: dict[str, float] = field(default_factory=dict)
    levels_repaired: dict[str, float] = field(default_factory=dict)
    repaired_share: float = 0.0
    bound: float = _BOUND
    shift: str = ""
    shift_prompts: int = 0
    shift_gain: tuple[float, ...] = ()
    shifted: float = 0.0
    shifted_repaired: dict[str, tuple[float, ...]] = field(default_factory=dict)
    neutral: int = 0

    def __post_init__(self) -> None:
        """Refuse figures that cannot be."""
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
            msg = f"a report on links holds finite figures, at least 0, at growing shares: {_ADVICE}"
            raise ArgumentError(msg)

    def with_shift(self) -> Self:
        """What is left where loads add the shift; the same where there is none."""
        return replace(self, linked=self.shifted, repaired=self.shifted_repaired) if self.shift else self

    @property
    def allowed(self) -> float:
        """KL divergence that links may have."""
        return self.bound * self.no_documents

    @property
    def is_within(self) -> bool:
        """Whether links are fine as they are."""
        return self.linked <= self.allowed

    def least_share(self, selector: str) -> float | None:
        """The least measured share at which links are within the bound."""
        if self.is_within:
            return 0.0
        row = self.repaired.get(selector, ())
        return next((share for share, kl in zip(self.shares, row, strict=False) if kl <= self.allowed), None)

    def best_selector(self, layers: int) -> str:
        """What serves this model best: of those that get links within the bound, the one that computes least."""
        known = [name for name in self.repaired if name in SELECTORS]  # others are of a later version
        if not known:
            return DEFAULT_SELECTOR
        shares = {name: self.least_share(name) for name in known}
        enough = {name: share for name, share in shares.items() if share is not None}
        if not enough:
            return min(known, key=lambda name: self.left(name)[-1])
        if not any(enough.values()):  # nothing is needed: whoever gives most for what it computes
            return min(enough, key=lambda name: self.left(name)[-1] + self.allowed * scan_of(selector_of(name), layers))
        return min(enough, key=lambda name: (enough[name] or 0.0) + scan_of(selector_of(name), layers))

    def left(self, selector: str) -> tuple[float, ...]:
        """KL divergence at no repair and at each share, made to fall."""
        out = [self.linked]
        for kl in self.repaired.get(selector, ()):
            out.append(min(out[-1], kl))
        return tuple(out)

    def to_json(self) -> bytes:
        """As it is stored; ``of_json`` reads it."""
        return json.dumps({"version": VERSION, **asdict(self)}, allow_nan=False).encode()

    @classmethod
    def _of_other_version(cls) -> Self:
        msg = f"it is not of version {VERSION}"
        raise ArgumentError(msg)

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Read what ``to_json`` wrote."""
        try:
            value: Any = strict_json(data.decode())
            if value.pop("version") not in _READ:
                return cls._of_other_version()
            given: dict[str, Any] = value | {"shares": tuple(value["shares"])}
            for told in {"repaired", "shifted_repaired"} & given.keys():
                given[told] = {name: tuple(row) for name, row in value[told].items()}
            given["shift_gain"] = tuple(value.get("shift_gain", ()))
            return cls(**given)
        except (ArgumentError, AttributeError, KeyError, OverflowError, TypeError, UnicodeDecodeError) as error:
            msg = f"the report on links is damaged ({error}); {_ADVICE}"
            raise CorruptError(msg) from error


def scan_of(selector: Selector, layers: int) -> float:
    """Share of a prefill that a selector takes to choose, the question's pass left out."""
    tokens = 1000
    return min(1.0, selector.cost(tokens, 0, 0, layers).token_layers / (tokens * layers)) if layers else 0.0
