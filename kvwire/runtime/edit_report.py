"""How much edited caches lose, as measured for a model and texts, and what loads do about it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple, Self

from kvwire._json import versioned_record
from kvwire.errors import ArgumentError
from kvwire.reuse import SELECTORS, selector_of
from kvwire.runtime.link_report import DEFAULT_SELECTOR, scan_of

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 1
EDIT_BOUND = 0.05
"""Of what the donor's own cache is wrong by: edits that are wrong by no more, at any share, are safe."""
UNMEASURED_SHARE = 0.15
"""Of the rows, computed anew where edits were not measured."""
_ADVICE = "run kvwire check-model --edits again"


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
            raise ArgumentError(f"a report on edits holds finite figures, at least 0, at growing shares: {_ADVICE}")

    def is_within(self, row: Sequence[float]) -> bool:
        """Whether KL divergences are within the bound, at every share of edited tokens."""
        return all(kl <= self.bound * donor for kl, donor in zip(row, self.donor, strict=True))

    def choose(self, layers: int, share: float | None = None, selector: str = "") -> EditRepair:
        """What loads do: the least that is within the bound, else the most that was measured, and what that loses.

        Args:
            layers: Of the model.
            share: Of rows that was asked for; None: as said.
            selector: That was asked for; empty: any.
        """
        alone = (0.0, selector or DEFAULT_SELECTOR, self.holes)
        options = [alone] if share == 0 or (share is None and self.is_within(self.holes)) else []
        nearest = min(self.shares, key=lambda each: (each > (share or 0.0), abs(each - (share or 0.0))))
        for name in self.repaired if share != 0 else ():
            if name in SELECTORS and selector in {"", name}:
                measured = zip(self.shares, self.repaired[name], strict=True)
                options += [(share or rows, name, row) for rows, row in measured if share is None or rows == nearest]
        if not options:
            return EditRepair(UNMEASURED_SHARE if share is None else share, selector or DEFAULT_SELECTOR)
        good = [each for each in options if self.is_within(each[2])]
        if good:
            best = min(good, key=lambda each: each[0] + (each[0] > 0) * scan_of(selector_of(each[1]), layers))
        else:
            best = min(options, key=lambda each: sum(each[2]))
        return EditRepair(best[0], best[1], tuple(zip(self.edited, best[2], strict=True)), bool(good))

    def to_json(self) -> bytes:
        """As it is stored; ``of_json`` reads it."""
        return json.dumps({"version": VERSION, **asdict(self)}, allow_nan=False).encode()

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Read what ``to_json`` wrote."""
        return versioned_record(data, cls, "the report on edits", _ADVICE, [VERSION])


def edit_repair(report: EditReport | None, repair: str | float, selector: str, layers: int) -> EditRepair:
    """What loads do about the stale rows of an edited cache.

    Args:
        report: What was measured; None: nothing.
        repair: As ``LoadSettings.repair``.
        selector: As ``LoadSettings.selector``.
        layers: Of the model.
    """
    name = "" if selector == "auto" else selector
    share = {"auto": None, "none": 0.0, "all": 1.0}[repair] if isinstance(repair, str) else float(repair)
    if report is not None:
        return report.choose(layers, share, name)
    return EditRepair(UNMEASURED_SHARE if share is None else share, name or DEFAULT_SELECTOR)
