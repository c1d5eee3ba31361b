"""Training hyperparameters: settings, and published ones by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvwire.errors import ArgumentError


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of AdamW and of batches.

    Attributes:
        steps: Updates.
        batch: Samples per update.
        learning_rate: The peak.
        warm_up: Updates of linear rise; half a cosine then falls to 0.
        betas: AdamW's.
        weight_decay: AdamW's.
        clip: Maximum norm of a gradient.
        most_tokens: Longest prompt including the layout's tokens; the model's window is a limit, too.
        micro_batch: Samples in memory at a time; affects results only by rounding.
    """

    steps: int = 1000
    batch: int = 32
    learning_rate: float = 1e-3
    warm_up: int = 50
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    most_tokens: int = 4096
    micro_batch: int = 8

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        counts = (self.steps, self.batch, self.micro_batch, self.most_tokens)
        rates = (self.learning_rate, self.clip)
        if min(counts) < 1 or self.warm_up < 0 or not all(0 < rate < math.inf for rate in rates):
            msg = "steps, batch, micro-batch and tokens are at least 1, warm-up at least 0, rate and clip above 0"
            raise ArgumentError(msg)

    def rate(self, step: int) -> float:
        """Learning rate of an update.

        Args:
            step: Counted from 0.

        Returns:
            The rate.
        """
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        left = max(1, self.steps - self.warm_up)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - self.warm_up) / left))


RECIPES = {
    "small": Recipe(),
    "kvlink": Recipe(steps=6000, batch=64, learning_rate=5e-6, warm_up=600, micro_batch=1),
    "kv-packet": Recipe(steps=1000, batch=32, learning_rate=5e-4, warm_up=0, micro_batch=1),
}
"""By name. ``small``: models of a few million parameters, in minutes on a processor. ``kvlink``: all parameters of
Llama-3 1B to 8B (arXiv 2502.16002). ``kv-packet``: soft tokens of a frozen model, from 5e-4 to 0 (arXiv 2604.13226;
steps and batch are ours)."""
