"""How models answer held-out prompts: read whole, linked, linked with rows repaired; and how they read prose."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from task_parts.evaluation import share
from task_repair import answers_right

from kvwire.reuse import RepairInput, link, link_documents, repair_laid_out, repair_prompt, selector_of
from kvwire.training import Sample, Turn, batch_of, linked, plain
from links_parts.data import MEASURED, held_out, prose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from task_parts.families import Prompt

    from kvwire.training.samples import TokenSequence
    from links_parts.runs import Learnt

SELECTORS = ("attention", "first", "cacheblend")
LINK_COUNTS = (1, 5)
"""Repair gets as many rows as there are link tokens."""
_BATCH = 50
_MORE = 4
"""Times as many prompts of the family where models differ by little."""


def samples_of(prompts: Sequence[Prompt]) -> list[Sample]:
    """Prompts with their first question, as training has them.

    Args:
        prompts: The prompts.

    Returns:
        A sample for each.
    """
    asked = (prompt.questions[0] for prompt in prompts)
    return [
        Sample(prompt.documents, (Turn(question.ids, (question.answer,)),))
        for prompt, question in zip(prompts, asked, strict=True)
    ]


@torch.no_grad()
def correct(learnt: Learnt, samples: Sequence[Sample], look: Callable[[Sample], TokenSequence]) -> list[bool]:
    """Which prompts are answered as expected.

    Args:
        learnt: The model.
        samples: Prompts with one answer of one token each.
        look: How a prompt is read.

    Returns:
        One truth value for each.
    """
    found: list[bool] = []
    for start in range(0, len(samples), _BATCH):
        batch = batch_of([look(sample) for sample in samples[start : start + _BATCH]])
        wanted = batch.targets >= 0
        found += (learnt.model.logits(batch, wanted).argmax(-1) == batch.targets[wanted]).tolist()
    return found


def accuracies(learnt: Learnt, prompts: int, seed: int, *, whole: bool) -> dict[str, Any]:
    """Accuracy of a model on every family.

    Args:
        learnt: The model.
        prompts: Of each family; of *redefined* four times as many.
        seed: Of the draw.
        whole: Whether documents are read in full prefill instead of linked.

    Returns:
        Shares with intervals, by family.
    """

    def look(sample: Sample) -> TokenSequence:
        return plain(sample) if whole else linked(sample, learnt.layout)

    found = {}
    for family in MEASURED:
        count = prompts * (_MORE if family == "redefined" else 1)
        found[family] = share(correct(learnt, samples_of(held_out(family, count, seed)), look))
    return found


@torch.no_grad()
def prose_loss(learnt: Learnt, count: int, seed: int) -> float:
    """Surprise of a model at prose without documents.

    Args:
        learnt: The model.
        count: Stretches.
        seed: Of the draw.

    Returns:
        Mean over tokens, in nats.
    """
    values = []
    for ids in prose(count, f"held out {seed}"):
        batch = batch_of([plain(Sample((), (Turn(tuple(ids[:1]), tuple(ids[1:])),)))])
        wanted = batch.targets >= 0
        told = learnt.model.logits(batch, wanted)
        values.append(float(torch.nn.functional.cross_entropy(told, batch.targets[wanted])))
    return statistics.fmean(values)


def repairs(learnt: Learnt, family: str, prompts: int, seed: int) -> dict[str, Any]:
    """Accuracy of a model with blind links and as many rows computed anew as link tokens would be.

    Args:
        learnt: A model that reads whole prompts, without soft tokens.
        family: One of ``MEASURED``.
        prompts: How many.
        seed: Of the draw.

    Returns:
        Shares with intervals for ``blind``, ``whole`` and each selector at each number of rows.
    """
    engine = learnt.engine
    hits: dict[str, list[bool]] = {}
    for prompt in held_out(family, prompts, seed):
        caches = engine.prefill(prompt.documents)
        text = tuple(token for ids in prompt.documents for token in ids)
        lengths = tuple(map(len, prompt.documents))
        (whole,) = engine.prefill([text])
        hits.setdefault("whole", []).append(answers_right(engine, prompt, whole))
        hits.setdefault("blind", []).append(answers_right(engine, prompt, link(caches)))
        for count in LINK_COUNTS:
            for name in SELECTORS:
                cache = link(caches)
                given = RepairInput(engine, cache, text, lengths, tuple(prompt.questions[0].ids))
                repair_prompt(given, selector_of(name), count * len(lengths) / len(text))
                hits.setdefault(f"{name}, {count * len(lengths)} rows", []).append(answers_right(engine, prompt, cache))
    return {name: share(found) for name, found in hits.items()}


@torch.no_grad()
def repairs_beside_links(learnt: Learnt, family: str, prompts: int, seed: int) -> dict[str, Any]:
    """Accuracy of a model with link tokens, by how many of its documents' rows are computed anew beside them.

    Args:
        learnt: A model that links were trained for; afterwards it runs as loads run it.
        family: One of ``MEASURED``.
        prompts: How many.
        seed: Of the draw.

    Returns:
        Shares with intervals for ``links alone`` and the question's attention at each number of rows.
    """
    learnt.finish()
    engine, attention = learnt.engine, selector_of("attention")
    hits: dict[str, list[bool]] = {}
    for prompt in held_out(family, prompts, seed):
        question, documents = prompt.questions[0], prompt.documents
        laid_out = learnt.layout.lay_out(documents, question.ids)
        caches = engine.prefill([learnt.layout.cache_tokens(ids) for ids in documents])
        for count in (0, *LINK_COUNTS):
            linked, rows = link_documents(engine, caches, laid_out), count * len(documents)
            share_of_rows = rows / sum(map(len, documents))
            if rows:
                repair_laid_out(engine, linked, laid_out, documents, question.ids, attention, share_of_rows)
            logits = engine.forward(engine.own_past(linked.cache), question.ids, laid_out.question_start, logits=1)
            name = f"and attention, {rows} rows" if rows else "links alone"
            hits.setdefault(name, []).append(int(logits[-1].argmax()) == question.answer)
    return {name: share(found) for name, found in hits.items()}
