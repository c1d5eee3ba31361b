"""Training: plain full prefill over prompts that grow, with a guide to where rows look until they find it alone.

Every prompt asks several questions, and tokens of the documents are to predict in place what they mean, so that a step
tells much. Two aids make the step from single tokens to facts short; neither leaves anything in the model: a linear
layer reads the token before each token off the first layer, and one head of the later layers is drawn to the fact that
a row asks for. The second aid ends after ``GUIDED`` of the steps.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from task_parts.families import FAMILIES, LISTED, NAMES, Prompt, Size, make
from task_parts.model import SEED, configuration
from task_parts.prose import WORDS

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 1500
SHORT = 400
"""Steps of short prompts at the beginning."""
GROWING = 0.5
"""Share of the steps after which prompts have their full range of sizes."""
GUIDED = 0.75
LEARNING_RATE = 3e-3
WATCHED = 100
WARM_UP = 100
TOKENS = 4000
"""Of a batch, about."""
SHORT_PROMPTS = 60
ASKED = 6
"""Questions that follow one prompt's documents in training."""
PROSE_WEIGHT, LISTED_WEIGHT, BEFORE_WEIGHT = 0.1, 0.3, 0.5


@dataclass(frozen=True)
class Batch:
    """Prompts of one length.

    Attributes:
        ids: ``[prompts, tokens]``.
        labels: What each token is to predict, ``[prompts, tokens]``.
        weights: How much that counts, ``[prompts, tokens]``.
        looks: ``[3, n]``: in prompt ``looks[0]`` the token ``looks[1]`` needs the token ``looks[2]``.
    """

    ids: Tensor
    labels: Tensor
    weights: Tensor
    looks: Tensor


def size_at(step: int, steps: int, draw: random.Random) -> Size:
    """How large the prompts of a step are: short ones first, then ever more and longer documents.

    Args:
        step: From 0.
        steps: Of the whole training.
        draw: Source of chance.

    Returns:
        The size of all its prompts.
    """
    if step < SHORT:
        documents, facts, chains, spare = 3, 2, 2, 2
    else:
        grown = min(1.0, (step - SHORT) / max(1.0, GROWING * steps - SHORT))
        documents, facts, chains = draw.randint(3, 3 + round(2 * grown)), draw.randint(2, 4), 3
        spare = 2 + round(28 * grown)
    least = 1 + 2 * max(facts, chains)
    tokens = tuple(least + draw.randint(0, spare) for _ in range(documents))
    return Size(tokens, hops=draw.randint(2, 3), chains=chains, facts=facts)


def batch_of(prompts: list[Prompt]) -> Batch:
    """Join prompts of one length, each with ``ASKED`` questions.

    Args:
        prompts: The prompts.

    Returns:
        The batch.
    """
    ids, labels, weights, looks = [], [], [], []
    for number, prompt in enumerate(prompts):
        row = [token for document in prompt.documents for token in document]
        wanted = [*row[1:], 0]
        weight = [PROSE_WEIGHT if token in WORDS else 0.0 for token in wanted]
        for at, token in enumerate(row):
            if at in prompt.labels:
                wanted[at], weight[at] = prompt.labels[at], 1.0
            elif wanted[at] == LISTED and token in NAMES:
                weight[at] = LISTED_WEIGHT
        looks += [(number, at, source) for at, source in prompt.sources.items()]
        for turn in range(ASKED):
            question = prompt.questions[turn % len(prompt.questions)]
            row += question.ids
            wanted += [0] * (len(question.ids) - 1) + [question.answer]
            weight += [0.0] * (len(question.ids) - 1) + [1.0]
            if question.source is not None:
                looks.append((number, len(row) - 1, question.source))
        ids.append(row)
        labels.append(wanted)
        weights.append(weight)
    return Batch(torch.tensor(ids), torch.tensor(labels), torch.tensor(weights), torch.tensor(looks).T)


def losses(model: LlamaForCausalLM, before: Linear, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """What a batch costs.

    Args:
        model: The model, with eager attention.
        before: Reads the token before each token off the first layer's output.
        batch: The prompts.

    Returns:
        The loss of the labels, that of ``before``, and that of where rows look.
    """
    out = model(input_ids=batch.ids, use_cache=False, output_hidden_states=True, output_attentions=True)
    each = cross_entropy(out.logits.flatten(0, 1), batch.labels.flatten(), reduction="none").view_as(batch.weights)
    read = model.lm_head(before(out.hidden_states[1][:, 1:]))
    at, row, column = batch.looks
    seen = torch.stack([weights[at, 0, row, column] for weights in out.attentions[1:]])
    return (
        (each * batch.weights).sum() / batch.weights.sum(),
        cross_entropy(read.flatten(0, 1), batch.ids[:, :-1].flatten()),
        -torch.log(seen + 1e-6).mean(),
    )


def rate(step: int, steps: int) -> float:
    """The learning rate over its greatest value: a linear rise, then half a cosine.

    Args:
        step: From 0.
        steps: Of the whole training.

    Returns:
        0 to 1.
    """
    return min(1.0, (step + 1) / WARM_UP) * max(0.01, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def train(
    seed: int = SEED, steps: int = STEPS, watch: Callable[[int, LlamaForCausalLM], None] | None = None
) -> LlamaForCausalLM:
    """Train a model; the same seed, machine and versions give the same one.

    Args:
        seed: Of weights and prompts.
        steps: How long; fewer than the default do not suffice.
        watch: Called with the number of steps and the model after every ``WATCHED`` of them.

    Returns:
        The model, ready to be evaluated.
    """
    torch.manual_seed(seed)
    draw = random.Random(seed)
    settings = configuration()
    model = LlamaForCausalLM._from_config(settings, attn_implementation="eager")  # noqa: SLF001 - sdpa tells no weights
    before = Linear(settings.hidden_size, settings.hidden_size)
    parameters = [*model.parameters(), *before.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * rate(step, steps)
        size = size_at(step, steps, draw)
        families = FAMILIES[:-1] if step < SHORT else FAMILIES
        length = sum(size.tokens) + 2 * ASKED
        count = SHORT_PROMPTS if step < SHORT else min(100, TOKENS // length // len(families) * len(families))
        batch = batch_of([make(families[number % len(families)], draw, size) for number in range(count)])
        told, read, seen = losses(model, before, batch)
        loss = told + BEFORE_WEIGHT * read + (seen if step < GUIDED * steps else 0.0)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if watch is not None and step % WATCHED == WATCHED - 1:
            watch(step + 1, model)
    model.set_attn_implementation("sdpa")
    return model.eval()
