"""Prompts that links are trained and judged on, and the files that training reads.

Beside the families of the task model there is *redefined*: a document may say anew what colours signs stand for, which
holds from there on, and uses signs that earlier documents told of. Which colour has a name? A question can look up the
name's sign, but not what the sign meant in that place: values carry no position. A link token can, since it stands
there. The documents are in order; those of *repeat* and *needle* may be shuffled.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from task_parts.families import COLOURS, NAMES, QUESTIONS, SIGNS, START, Prompt, Question, Size, make
from task_parts.prose import TOPICS, walk

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = {"redefined": 10.0, "needle": 0.5, "prose": 1.0}
"""What training mixes."""
MEASURED = ("redefined", "needle", "legend")
ORDERED = ("redefined", "chain", "legend")
DOCUMENTS, SIGNS_USED, DEFINITIONS, USES = 5, 5, 2, 5
SMALL = Size(tokens=(13,) * DOCUMENTS)
"""Of the task model's families, so that a training takes minutes."""
TURNS = 8
PROSE_TOKENS = 64


def redefined(draw: random.Random) -> Prompt:
    """Draw a prompt of the family.

    Args:
        draw: Source of chance.

    Returns:
        Five documents; the first defines five signs, each later one two of them anew and uses the others.
    """
    signs = SIGNS[:SIGNS_USED]
    colours = draw.sample(COLOURS, SIGNS_USED + DEFINITIONS * (DOCUMENTS - 1))
    names = draw.sample(NAMES, USES * (DOCUMENTS - 1))
    meaning: dict[int, int] = {}
    documents, questions = [], []
    for number in range(DOCUMENTS):
        told = draw.sample(signs, DEFINITIONS if number else SIGNS_USED)
        ids = [START]
        for sign in told:
            meaning[sign] = colours.pop()
            ids += [sign, meaning[sign]]
        for _ in range(USES if number else 0):
            name, sign = names.pop(), draw.choice([sign for sign in signs if sign not in told])
            ids += [name, sign]
            questions.append(Question((QUESTIONS["legend"], name), meaning[sign]))
        documents.append(tuple(ids))
    draw.shuffle(questions)
    return Prompt("redefined", tuple(documents), tuple(questions))


def prompt_of(family: str, draw: random.Random) -> Prompt:
    """Draw a prompt of any family.

    Args:
        family: One of ``MEASURED``.
        draw: Source of chance.

    Returns:
        The prompt.
    """
    return redefined(draw) if family == "redefined" else make(family, draw, SMALL)


def held_out(family: str, count: int, seed: int) -> list[Prompt]:
    """Prompts that training did not see.

    Args:
        family: One of ``MEASURED``.
        count: How many.
        seed: Of the draw.

    Returns:
        The prompts.
    """
    draw = random.Random(f"held out {family} {seed}")
    return [prompt_of(family, draw) for _ in range(count)]


def prose(count: int, seed: str) -> list[list[int]]:
    """Stretches of the task model's prose.

    Args:
        count: How many.
        seed: Of the draw.

    Returns:
        Token ids of each.
    """
    draw = random.Random(f"prose {seed}")
    return [[START, *walk(draw, draw.randrange(TOPICS), PROSE_TOKENS)] for _ in range(count)]


def write_files(folder: Path, count: int, seed: int, *, linked: bool) -> dict[Path, float]:
    """Write what training reads, in the format of ``kvwire train-links``.

    Args:
        folder: Where.
        count: Samples of the heaviest family; others have a fifth.
        seed: Of the draw.
        linked: Whether documents are passages, or words before the question, as the control reads them.

    Returns:
        Weights by file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for family, weight in WEIGHTS.items():
        some = max(1, round(count * weight / max(WEIGHTS.values())))
        draw = random.Random(f"training {family} {seed}")
        if family == "prose":
            lines: list[dict[str, Any]] = [{"text": ids} for ids in prose(some, f"training {seed}")]
        else:
            lines = [_line(prompt_of(family, draw), draw, linked=linked) for _ in range(some)]
        path = folder / f"{family}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        files[path] = weight
    return files


def _line(prompt: Prompt, draw: random.Random, *, linked: bool) -> dict[str, Any]:
    asked = draw.sample(prompt.questions, min(TURNS, len(prompt.questions)))
    turns = [{"question": list(each.ids), "answer": [each.answer]} for each in asked]
    documents = [list(ids) for ids in prompt.documents]
    if linked:
        return {"passages": documents, "turns": turns, "ordered": prompt.family in ORDERED}
    if prompt.family not in ORDERED:
        draw.shuffle(documents)
    turns[0]["question"] = [token for ids in documents for token in ids] + turns[0]["question"]
    return {"turns": turns}
