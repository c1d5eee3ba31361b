"""The rotary position embedding of a layer, as data."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.errors import ArgumentError


@dataclass(frozen=True)
class RopeRegime:
    """How positions were rotated into keys (RoFormer, arXiv 2104.09864), whatever rule made the frequencies.

    Attributes:
        inv_freq: Radians per token of each rotated pair, float32 values; linear, llama3 and yarn scaling are already in
            it.
        interleaved: Pairs are (2j, 2j + 1); otherwise (j, j + rotary_dim / 2).
        attention_scaling: Factor that the model multiplies into cos and sin (yarn, longrope). Moving keys preserves it.
        max_positions: Positions at and beyond this use other frequencies (dynamic, longrope); None: no such limit.
        kind: The rule's usual name, for people.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    attention_scaling: float = 1.0
    max_positions: int | None = None
    kind: str = "default"

    def __post_init__(self) -> None:
        """Refuse a regime without frequencies."""
        if not self.inv_freq:
            msg = "a RoPE regime needs at least one frequency; use rope=None for layers without positions"
            raise ArgumentError(msg)

    @property
    def rotary_dim(self) -> int:
        """Dimensions that are rotated, side by side; the rest pass through (partial rotary)."""
        return 2 * len(self.inv_freq)
