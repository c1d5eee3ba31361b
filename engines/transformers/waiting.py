"""A forward pass over a cache that is still being decoded: each layer waits only for its own part."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from kvwire.engines.transformers.plain import runs_as_it_is
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from transformers import PreTrainedModel

    from kvwire.types import KVCache


class Ready(Protocol):
    """An event to wait for, such as ``kvwire.codec.StreamEvent``."""

    def hold(self) -> None:
        """Make the current stream wait for it."""


def check_runs_unready(cache: KVCache, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a cache that needs conversion before the model can run on it."""
    if not runs_as_it_is(cache, device, dtype):
        msg = "only an unpruned cache with positions, in the model's dtype and device, can run while it is decoded"
        raise ArgumentError(msg)


@contextmanager
def held(model: PreTrainedModel, layers: Sequence[Ready]) -> Iterator[None]:
    """In this context, all modules of a layer wait for its cache.

    Layers without modules (by ``layer_idx``) are waited for at once.
    """
    hooks, hooked = [], set()
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index < len(layers):
            hooks.append(module.register_forward_pre_hook(lambda *_, layer=layers[index]: layer.hold()))
            hooked.add(index)
    for index in set(range(len(layers))) - hooked:
        layers[index].hold()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
