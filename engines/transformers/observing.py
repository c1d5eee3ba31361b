"""Statistics for a profile, from passes over some documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.engines.calibration import gather_gradients
from kvwire.engines.transformers.capture import QueryRecorder, recording
from kvwire.engines.transformers.plain import tensors_of
from kvwire.engines.transformers.text import ATLAS_CONTEXT, look_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec import Statistics
    from kvwire.engines.transformers.model import DescribedModel

_QUERIED, _LONGEST = 3, 512
"""Number of documents, and tokens of each, whose queries are recorded."""


def observed_statistics(
    engine: DescribedModel, documents: Sequence[Sequence[int]], *, tokens: bool, sensitivity: bool
) -> Statistics | None:
    """Run documents and record how their caches are used; see ``TransformersEngine.statistics``."""
    recorder = QueryRecorder(engine.meta, engine.model)
    with recording(recorder, engine.model):
        for ids in _queried(documents):
            past = DynamicCache()
            batch = torch.tensor([list(ids)], device=engine.device)
            engine.model(input_ids=batch, past_key_values=past, use_cache=True, logits_to_keep=1)
            recorder.record_cache(tensors_of(past))
    gathered = gather_gradients(engine, documents, recorder.builder) if sensitivity else 0
    if not (recorder.modules or gathered or tokens):
        return None
    return recorder.statistics(_token_features(engine, documents) if tokens else None)


def _queried(documents: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """A few texts for the queries, spread over the longer half: queries of other texts are distributed alike."""
    longer = sorted(range(len(documents)), key=lambda index: -len(documents[index]))
    longer = sorted(longer[: max(_QUERIED, len(documents) // 2)])
    count = min(_QUERIED, len(longer))
    return [documents[longer[number * len(longer) // count]][:_LONGEST] for number in range(count)]


def _token_features(engine: DescribedModel, documents: Sequence[Sequence[int]]) -> Tensor:
    longest = max(documents, key=len)
    start = max(0, (len(longest) - ATLAS_CONTEXT) // 2)
    room = min(ATLAS_CONTEXT, engine.window - 1)
    (context,) = engine.prefill([longest[start : start + room]])
    seen = [token for ids in documents for token in ids]
    soft = engine.soft_tokens if max(seen) >= engine.vocabulary_size else None
    return look_up(engine.model, engine.meta, context, seen, soft.embeddings if soft else None)
