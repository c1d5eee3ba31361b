"""Statistics for a profile, from runs of some documents."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.engines.calibration import gather_gradients, measure_sensitivity
from kvwire.engines.transformers.capture import QueryRecorder, recording
from kvwire.engines.transformers.plain import tensors_of
from kvwire.engines.transformers.text import ATLAS_CONTEXT, look_up
from kvwire.engines.weighting import choose_weighting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.codec import Statistics, Vocabulary
    from kvwire.engines.transformers.model import DescribedModel


def observed_statistics(
    engine: DescribedModel, documents: Sequence[Sequence[int]], *, tokens: bool, sensitivity: bool
) -> Statistics | None:
    """Run documents and see what their caches are used for; see ``TransformersEngine.statistics``.

    Args:
        engine: Runs the model, and backpropagates where it can.
        documents: Token ids of each, one document at least.
        tokens: Whether to look the vocabulary up.
        sensitivity: Whether to measure what errors do to answers.

    Returns:
        The statistics; None where nothing is known.
    """
    recorder = QueryRecorder(engine.meta, engine.model)
    with recording(recorder, engine.model):
        for ids in documents:
            past = DynamicCache()
            batch = torch.tensor([list(ids)], device=engine.device)
            engine.model(input_ids=batch, past_key_values=past, use_cache=True, logits_to_keep=1)
            recorder.record_cache(tensors_of(past))
    gathered = gather_gradients(engine, documents, recorder.builder) if sensitivity else 0
    if not (recorder.modules or gathered or tokens):
        return None
    found = recorder.statistics(_vocabulary(engine, documents) if tokens else None)
    if not sensitivity:
        return found
    found = replace(found, sensitivity=measure_sensitivity(engine, documents, found))
    return replace(found, weighting=choose_weighting(engine, documents, found))


def _vocabulary(engine: DescribedModel, documents: Sequence[Sequence[int]]) -> Vocabulary:
    longest = max(documents, key=len)
    start = max(0, (len(longest) - ATLAS_CONTEXT) // 2)
    room = min(ATLAS_CONTEXT, engine.window - 1)
    (context,) = engine.prefill([longest[start : start + room]])
    seen = [token for ids in documents for token in ids]
    soft = engine.soft_tokens if max(seen) >= engine.vocabulary_size else None
    return look_up(engine.model, engine.meta, context, seen, soft.embeddings if soft else None)
