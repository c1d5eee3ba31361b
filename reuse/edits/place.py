"""Donors' rows at the places that an edit script gives them in a prompt, and the rows of its holes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.reuse.assemble import LinkedPrompt
    from kvwire.reuse.edits.script import EditScript
    from kvwire.reuse.repair.rows import RowsEngine
    from kvwire.types import KVCache

BLOCK_ROWS = 1024
"""Rows that are computed at once; each sees all before it as it stays, so that blocks come to what one pass would."""


def place_spans(prompt: LinkedPrompt, donors: Sequence[KVCache], script: EditScript) -> Tensor:
    """Write the rows of all spans where they stand in a prompt, moved from where they stand in the donors.

    Args:
        prompt: Of one document, which is as long as the script says; it is written to.
        donors: The caches, from each donor's first token on, at any positions; they stay as they are.
        script: Which rows go where.

    Returns:
        int64: positions of the rows in holes, which hold nothing yet, the prompt's opening counted.

    Raises:
        ArgumentError: The prompt is of another length, or a donor is pruned.
        MismatchError: A donor is of another model.
        RopeRegimeError: Rows cannot be moved so far.
    """
    if prompt.tokens != (script.tokens,):
        msg = f"an edit script of {script.tokens} tokens fills one document of as many, got {prompt.tokens}"
        raise ArgumentError(msg)
    for span in script.spans:
        donor = donors[span.donor]
        if donor.kept is not None:
            raise ArgumentError("a pruned cache gives no rows to other prompts")
        prompt.write(0, span.start, donor.slice(span.at, span.at + span.tokens))
    head = prompt.starts[0]
    parts = [torch.arange(head + start, head + stop) for start, stop in script.holes]
    return torch.cat(parts or [torch.arange(0)])


def compute_holes(engine: RowsEngine, prompt: LinkedPrompt, token_ids: Sequence[int], rows: Tensor) -> None:
    """Compute the rows of holes, each at its position against all that stands before it.

    Args:
        engine: Runs the model.
        prompt: With its spans, in the engine's own memory; it is written to.
        token_ids: Of the whole prompt, its opening included.
        rows: From ``place_spans``.

    Raises:
        ArgumentError: The cache cannot be written in place.
        MismatchError: The model cannot run rows.
    """
    for start in range(0, len(rows), BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        end = int(block[-1]) + 1  # what stands behind is not seen, and may be nothing yet
        engine.update_rows(prompt.cache.slice(0, end), token_ids[:end], block)
