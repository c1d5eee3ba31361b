"""The rotary position embedding of a layer, as data."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.errors import ArgumentError


@dataclass(frozen=True)
class RopeRegime:
    """How positions were rotated into keys (RoFormer, arXiv 2104.09864), for any frequencies.

    Attributes:
        inv_freq: Radians per token of each rotated pair, float32 values, after linear, llama3 or yarn scaling.
        interleaved: Pairs are (2j, 2j + 1); otherwise (j, j + rotary_dim / 2).
        attention_scaling: Factor that the model multiplies into cos and sin (yarn, longrope). Rotating further
            preserves it.
        max_positions: Positions at and beyond this use other frequencies (dynamic, longrope); None: no such limit.
        kind: The rule's usual name, for messages.
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
        """Number of rotated dimensions, contiguous; the rest pass through (partial rotary)."""
        return 2 * len(self.inv_freq)
