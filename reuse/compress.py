"""Fewer tokens of a document in its cache: anchors in place of chunks, and tokens that tell nothing left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.reuse.layout import LinkLayout
    from kvwire.types import KVCache


class MaskedEngine(Protocol):
    """What computing a document with anchors asks of an engine; see ``kvwire.engines.base.Engine``."""

    def prefill(self, documents: Sequence[Sequence[int]]) -> list[KVCache]: ...  # noqa: D102 - see there

    def prefill_masked(self, token_ids: Sequence[int], visible: Tensor) -> KVCache: ...  # noqa: D102 - see there


class ScoringEngine(Protocol):
    """What surprisals ask of an engine; see ``kvwire.engines.base.Engine``."""

    def forward(self, past: Any, token_ids: Sequence[int], start: int, *, logits: int = 0) -> Tensor: ...  # noqa: ANN401, D102 - see there


def compute_cached(engine: MaskedEngine, layout: LinkLayout, token_ids: Sequence[int]) -> KVCache:
    """Compute a document's cache as a layout has it.

    With anchors (KVLink, arXiv 2502.16002, section 2.4), a chunk's tokens and anchors see the chunk and the anchors
    before it, and what is not an anchor is pruned: positions stay as they are.

    Args:
        engine: Runs the model.
        layout: The layout.
        token_ids: The document's own.

    Returns:
        The cache, ``layout.cache_length`` long.

    Raises:
        MismatchError: The layout has anchors, and the engine takes no masks.
    """
    ids = layout.cache_tokens(token_ids)
    visible, stored = layout.cache_visible(len(ids)), layout.cache_stored(len(ids))
    if visible is None or stored is None:
        return engine.prefill([ids])[0]
    whole = engine.prefill_masked(ids, visible)
    kept = [None if spec.kind == "none" else stored.expand(spec.kv_heads, -1) for spec in whole.meta.layers]
    keys = [key * stored[None, :, None].to(key) if key.numel() else key for key in whole.keys]
    values = [value * stored[None, :, None].to(value) if value.numel() else value for value in whole.values]
    return replace(whole, keys=keys, values=values, kept=tuple(kept))


def surprisals(engine: ScoringEngine, token_ids: Sequence[int]) -> Tensor:
    """How little a model expects each token of a text.

    Args:
        engine: Runs the model.
        token_ids: The text's.

    Returns:
        Float32 ``[tokens]`` on the processor, in nats; infinite for the first token, which nothing stands before.
    """
    logits = engine.forward(None, token_ids, 0).float().cpu().log_softmax(-1)
    told = -logits[:-1].gather(1, torch.tensor(list(token_ids[1:]), dtype=torch.long)[:, None])[:, 0]
    return torch.cat([torch.tensor([torch.inf]), told])


def drop_tokens(engine: ScoringEngine, token_ids: Sequence[int], share: float) -> tuple[int, ...]:
    """Leave out the tokens of a text that the model expects most, before it is encoded.

    What is left is a shorter text with positions of its own. Selective Context (arXiv 2310.06201) drops by the same
    measure; LLMLingua-2 (arXiv 2403.12968) trains a classifier for it.

    Args:
        engine: Runs the model.
        token_ids: The text's.
        share: Of the tokens, 0 to 1, that is dropped; the first token stays.

    Returns:
        The tokens that are left, in their order; of equally expected ones, the later are dropped first.

    Raises:
        ArgumentError: The share is none.
    """
    if not 0 <= share < 1:
        msg = f"the share of tokens to drop is 0 to 1, and less than 1, got {share}"
        raise ArgumentError(msg)
    count = len(token_ids) - int(share * len(token_ids))
    kept = surprisals(engine, token_ids).sort(descending=True, stable=True).indices[:count].sort().values
    return tuple(token_ids[at] for at in kept.tolist())
