"""What the task model answers in full prefill, linked blindly, and with some rows repaired."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvwire.reuse import block_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from transformers import LlamaForCausalLM

    from task_parts.families import Prompt

BATCH = 50
NORMAL_95 = 1.959964


@dataclass(frozen=True)
class View:
    """One pass over a prompt.

    Attributes:
        ids: Token ids of the pass.
        positions: Position in the prompt of each.
        visible: Bool ``[tokens, tokens]``: row r sees column c.
    """

    ids: list[int]
    positions: list[int]
    visible: Tensor


def flat(prompt: Prompt) -> list[int]:
    """Token ids of the documents and of the question that is measured.

    Args:
        prompt: The prompt.

    Returns:
        Its ids, in order.
    """
    return [*(token for ids in prompt.documents for token in ids), *prompt.questions[0].ids]


def full(prompt: Prompt) -> View:
    """Full prefill: every row sees all before it.

    Args:
        prompt: The prompt.

    Returns:
        The pass.
    """
    ids = flat(prompt)
    return masked(prompt, torch.ones(len(ids), len(ids), dtype=torch.bool).tril())


def blind(prompt: Prompt) -> View:
    """K = 0 linking: documents see themselves alone, the question sees everything.

    Args:
        prompt: The prompt.

    Returns:
        The pass.
    """
    return masked(prompt, block_mask([len(ids) for ids in prompt.documents], len(prompt.questions[0].ids)))


def masked(prompt: Prompt, visible: Tensor) -> View:
    """A pass under any mask.

    Args:
        prompt: The prompt.
        visible: Bool ``[tokens, tokens]`` over documents and question.

    Returns:
        The pass.
    """
    ids = flat(prompt)
    return View(ids, list(range(len(ids))), visible)


def repaired(prompt: Prompt, rows: Iterable[int]) -> View:
    """K = 0 linking with some rows recomputed: the naive twin of selective recompute, in one pass.

    The rows stand in the pass twice. Where they were first, they are as their document made them alone, and its other
    rows go on seeing that. Behind the documents they stand again at their true positions and see all that is before
    them: stale rows, or the second version of those that have one. So does the question.

    Args:
        prompt: The prompt.
        rows: Positions of the rows to recompute, in any order.

    Returns:
        The pass.
    """
    chosen = sorted(set(rows))
    view = blind(prompt)
    documents = sum(map(len, prompt.documents))
    second = [*chosen, *range(documents, len(view.ids))]
    positions = [*range(documents), *second]
    visible = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    visible[:documents, :documents] = view.visible[:documents, :documents]
    at = torch.tensor(positions)
    current = torch.ones(len(positions), dtype=torch.bool)
    current[chosen] = False
    visible[documents:] = current & (at[None, :] <= at[documents:, None])
    return View([view.ids[position] for position in positions], positions, visible)


@torch.no_grad()
def answers(model: LlamaForCausalLM, views: Sequence[View]) -> list[int]:
    """The token that the model predicts at the end of each pass.

    Args:
        model: The model.
        views: Passes, all of one length.

    Returns:
        A token for each.
    """
    found: list[int] = []
    for start in range(0, len(views), BATCH):
        some = views[start : start + BATCH]
        out = model(
            input_ids=torch.tensor([view.ids for view in some]),
            position_ids=torch.tensor([view.positions for view in some]),
            attention_mask=torch.stack([view.visible for view in some])[:, None],
            use_cache=False,
            logits_to_keep=1,
        )
        found += out.logits[:, -1].argmax(-1).tolist()
    return found


def correct(model: LlamaForCausalLM, prompts: Sequence[Prompt], look: Callable[[Prompt], View]) -> list[bool]:
    """Which prompts are answered as expected.

    Args:
        model: The model.
        prompts: Prompts of one size and family.
        look: What each row of a prompt sees, such as ``full`` or ``blind``.

    Returns:
        One truth value for each prompt.
    """
    found = answers(model, [look(prompt) for prompt in prompts])
    return [token == prompt.questions[0].answer for token, prompt in zip(found, prompts, strict=True)]


def share(hits: Sequence[bool]) -> dict[str, Any]:
    """A share with its 95 % interval (Wilson's).

    Args:
        hits: What was right.

    Returns:
        n, the share, and both ends of the interval.
    """
    n, p = len(hits), sum(hits) / len(hits)
    z = NORMAL_95 * NORMAL_95 / n
    middle, half = (p + z / 2) / (1 + z), NORMAL_95 * math.sqrt(p * (1 - p) / n + z / n / 4) / (1 + z)
    return {"n": n, "accuracy": p, "least": max(0.0, middle - half), "greatest": min(1.0, middle + half)}
