"""A tiny model whose tasks need attention across documents: made on two cores, and what blind linking costs it."""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import RESULTS, one_thread, table, write_json
from task_parts.evaluation import blind, correct, full, repaired, share
from task_parts.families import FAMILIES, Prompt, Size, make
from task_parts.model import FOLDER, SEED, load, save
from task_parts.training import STEPS, train

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

HELD_OUT = "held out"
"""Seeds held-out prompts; training never draws from it."""


def held_out(family: str, count: int, size: Size | None = None, seed: int = SEED) -> list[Prompt]:
    """Prompts that training did not see.

    Args:
        family: One of ``FAMILIES``.
        count: How many.
        size: How large.
        seed: Of the draw.

    Returns:
        The prompts.
    """
    draw = random.Random(f"{HELD_OUT} {family} {seed}")
    return [make(family, draw, size) for _ in range(count)]


class Progress:
    """Prints how well each family is answered while the model learns."""

    def __init__(self, prompts: int = 60) -> None:
        """Draw what is asked.

        Args:
            prompts: Of each family.
        """
        self._prompts = {family: held_out(family, prompts, seed=SEED + 1) for family in FAMILIES}
        self._started = time.monotonic()

    def __call__(self, step: int, model: LlamaForCausalLM) -> None:
        """Ask.

        Args:
            step: Number of steps done.
            model: As it is now.
        """
        model.set_attn_implementation("sdpa")
        cells = []
        for family, prompts in self._prompts.items():
            seen, unseen = (sum(correct(model, prompts, look)) / len(prompts) for look in (full, blind))
            cells.append(f"{family} {seen:.2f} {unseen:.2f}")
        model.set_attn_implementation("eager")
        print(f"{step:5d}  {time.monotonic() - self._started:5.0f} s  (full, K = 0)  {'  '.join(cells)}", flush=True)
