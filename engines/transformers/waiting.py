"""A forward pass over a cache that is still being decoded: each layer waits for its own part only."""

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
    """Something to wait for; ``kvwire.codec.StreamEvent`` is one."""

    def hold(self) -> None:
        """Let the current stream go on only once it is there."""


def check_runs_unready(cache: KVCache, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a cache that would have to be changed before it is run."""
    if not runs_as_it_is(cache, device, dtype):
        msg = "only a cache with positions, unpruned, of the model's dtype and on its device can be run unready"
        raise ArgumentError(msg)


@contextmanager
def held(model: PreTrainedModel, layers: Sequence[Ready]) -> Iterator[None]:
    """While inside, everything in the model that belongs to a layer waits for it.

    Layers that no module says it belongs to are waited for at once.
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
