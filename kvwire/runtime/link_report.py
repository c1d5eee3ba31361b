"""How much linked documents lose by not seeing each other, as measured for a model and texts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

from kvwire._json import strict_json
from kvwire.errors import ArgumentError, CorruptError
from kvwire.reuse import SELECTORS, selector_of

if TYPE_CHECKING:
    from kvwire.reuse import Selector

DEFAULT_SELECTOR = "attention"
VERSION = 1
_ADVICE = "run kvwire check-model again"
_BOUND = 0.1
"""Of what documents tell a question at all: links that lose no more are fine."""


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

    def __post_init__(self) -> None:
        """Refuse figures that cannot be.

        Raises:
            ArgumentError: One of them cannot be.
        """
        figures = (
            self.no_documents, self.linked, self.linked_error, self.repaired_share, self.bound, *self.shares,
            *(each for row in self.repaired.values() for each in row), *self.levels.values(),
            *self.levels_repaired.values(),
        )  # fmt: skip
        sound = all(isfinite(figure) and figure >= 0 for figure in figures)
        rows = all(len(row) == len(self.shares) for row in self.repaired.values())
        grows = list(self.shares) == sorted(set(self.shares)) and all(0 < share <= 1 for share in self.shares)
        if not (sound and rows and grows and self.prompts > 0):
            msg = f"a report on links holds finite figures, at least 0, at growing shares: {_ADVICE}"
            raise ArgumentError(msg)

    @property
    def allowed(self) -> float:
        """KL divergence that links may have."""
        return self.bound * self.no_documents

    @property
    def is_within(self) -> bool:
        """Whether links are fine as they are."""
        return self.linked <= self.allowed

    def least_share(self, selector: str) -> float | None:
        """The least measured share at which links are within the bound.

        Args:
            selector: Its name.

        Returns:
            The share, 0 where none is needed; None where no measured share is enough.
        """
        if self.is_within:
            return 0.0
        row = self.repaired.get(selector, ())
        return next((share for share, kl in zip(self.shares, row, strict=False) if kl <= self.allowed), None)

    def best_selector(self, layers: int) -> str:
        """What serves this model best: of those that get links within the bound, the one that computes least.

        Args:
            layers: Of the model.

        Returns:
            Its name; where none gets there, the one that leaves least.
        """
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
        """Read what ``to_json`` wrote.

        Args:
            data: The bytes.

        Returns:
            The report.

        Raises:
            CorruptError: ``to_json`` did not write this.
        """
        try:
            value: Any = strict_json(data.decode())
            if value.pop("version") != VERSION:
                return cls._of_other_version()
            given: dict[str, Any] = value | {"shares": tuple(value["shares"])}
            given["repaired"] = {name: tuple(row) for name, row in value["repaired"].items()}
            return cls(**given)
        except (ArgumentError, AttributeError, KeyError, OverflowError, TypeError, UnicodeDecodeError) as error:
            msg = f"the report on links is damaged ({error}); {_ADVICE}"
            raise CorruptError(msg) from error


def scan_of(selector: Selector, layers: int) -> float:
    """Share of a prefill that a selector takes to choose, the question's pass left out.

    Args:
        selector: The selector.
        layers: Of the model.

    Returns:
        The share, 0 to 1.
    """
    tokens = 1000
    return min(1.0, selector.cost(tokens, 0, 0, layers).token_layers / (tokens * layers)) if layers else 0.0
