"""Devices of a model's parts: a single one, or several by a device map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.errors import MismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Devices:
    """Devices of token ids and caches.

    Attributes:
        inputs: Of token ids, and of whole caches outside the model.
        layers: Of each layer's keys and values inside the model; empty if all are at ``inputs``.
    """

    inputs: torch.device
    layers: tuple[torch.device, ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Devices:
        """Find a model's devices; if it is spread, one token's cache shows where its layers compute."""
        inputs = input_device(model)
        if not is_spread(model):
            return cls(inputs)
        past = DynamicCache()
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=inputs), past_key_values=past, use_cache=True)
        found = [getattr(layer, "keys", None) for layer in past.layers]
        layers = tuple(inputs if keys is None else keys.device for keys in found)
        return cls(inputs, () if set(layers) == {inputs} else layers)

    def layer(self, number: int) -> torch.device:
        """Device of a layer's keys and values."""
        return self.layers[number] if self.layers else self.inputs

    def check_single(self) -> None:
        """Refuse a model whose layers compute on several devices."""
        if self.layers:
            msg = "repair does not run on a model that is spread over devices; load with repair none, or open it on one"
            raise MismatchError(msg)


def is_spread(model: PreTrainedModel) -> bool:
    """Whether a device map spread the model over several devices."""
    return len({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}) > 1


def input_device(model: PreTrainedModel) -> torch.device:
    """The model's device of token ids."""
    device = torch.device(model.device)
    if device.type != "meta":
        return device
    place = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    if isinstance(place, int):
        return torch.device("cuda", place)
    return torch.device("cpu" if place is None else place)
