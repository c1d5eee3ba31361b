"""A forward pass over a cache that is still being decoded: each layer waits for its own part only."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel


class Ready(Protocol):
    """Something to wait for; ``kvwire.codec.StreamEvent`` is one."""

    def hold(self) -> None:
        """Let the current stream go on only once it is there."""


def referring(pairs: Sequence[tuple[Tensor, Tensor]], model: PreTrainedModel) -> DynamicCache | None:
    """A cache whose layers are these very tensors, which nothing has read yet.

    Args:
        pairs: Keys and values ``[1, kv_heads, tokens, dim]`` of each layer.
        model: The model that will read them.

    Returns:
        The cache; None where the model has layers that keep another form of what they are given.
    """
    past = DynamicCache(config=model.config)
    plain = [layer for layer in past.layers if isinstance(layer, DynamicLayer) and not layer.is_sliding]
    if len(past.layers) != len(pairs) or len(plain) != len(pairs):
        return None
    for layer, (keys, values) in zip(plain, pairs, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return past


@contextmanager
def held(model: PreTrainedModel, layers: Sequence[Ready]) -> Iterator[None]:
    """While inside, everything in the model that belongs to a layer waits for it.

    Layers that no module says it belongs to are waited for at once.

    Args:
        model: The model that is run inside.
        layers: What to wait for, by number of the layer.
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
