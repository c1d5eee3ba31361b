"""Readable twins of what the codec does fast."""

from __future__ import annotations

import numpy as np
import torch


def values_naive(matrix):
    """Compute ``QuantisedMatrix.values`` entry by entry: its readable twin."""
    rows = [
        [np.float32(entry) * row * column for entry, column in zip(line, matrix.column_steps, strict=True)]
        for line, row in zip(matrix.entries, matrix.row_steps, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float32).reshape(matrix.entries.shape).bfloat16()


def expected_naive(text, group, start, stop):
    """Predict as ``TextPredictor.expected`` does, up to bfloat16 rounding: its readable twin."""
    chosen = text.profile.groups[group]
    out = torch.from_numpy(chosen.mean).repeat(stop - start, 1)
    parts = []
    if text.token_ids is not None and text.profile.table is not None:
        parts.append(torch.from_numpy(text.profile.table[text.token_ids[start:stop]]).float())
    if text.hidden is not None:
        parts.append(text.hidden[start:stop])
    return out if chosen.predictor is None else out + torch.cat(parts, 1) @ chosen.predictor.float()


def round_with_feedback_naive(matrix, rows, columns, lower):
    """Round as ``round_with_feedback`` does: its readable twin."""
    entries = torch.zeros_like(matrix)
    for column in reversed(range(matrix.shape[1])):
        steps = rows[:, None] * columns
        errors = (entries * steps - matrix)[:, column + 1 :]
        wanted = matrix[:, column] - errors @ lower[column + 1 :, column]
        entries[:, column] = (wanted / steps[:, column]).round()
    return entries
