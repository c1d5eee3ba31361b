"""Statistics for the profile: how strong queries are, and what the output projection makes of values.

Queries are seen where attention receives them, after any normalisation and rotation; a rotation does not change the
energy of a pair, so rotated queries serve.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvwire.codec import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.types import CacheMeta, RopeRegime

_LOCK = threading.Lock()
"""The attention functions belong to transformers and are shared by all models: one capture at a time."""
_OUTPUT_NAMES = ("o_proj", "dense", "out_proj", "wo")
_EAGER = "eager_attention_forward"
"""What every modeling file of transformers calls its own plain attention."""
SDPA = "sdpa"


class QueryRecorder:
    """Sums query energies of one model and notes the attention module of each layer.

    Only calls from the thread that made the recorder, and from modules of its model, count.
    """

    def __init__(self, meta: CacheMeta, model: PreTrainedModel) -> None:
        """Start from nothing."""
        self._meta = meta
        self._thread = threading.get_ident()
        self._modules = {id(module) for module in model.modules()}
        self._energy: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}
        self.modules: dict[int, torch.nn.Module] = {}

    def record(self, module: torch.nn.Module, query: Tensor) -> None:
        """Add a layer's queries ``[1, heads, tokens, key_dim]``."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self._meta.layers):
            return
        if threading.get_ident() != self._thread or id(module) not in self._modules:
            return
        self.modules[layer] = module
        energy = query[0].float().pow(2).sum(1).cpu()
        self._energy[layer] = self._energy[layer] + energy if layer in self._energy else energy
        self._tokens[layer] = self._tokens.get(layer, 0) + query.shape[2]

    def statistics(self) -> Statistics | None:
        """What was seen; None for layers that attention never showed, and None alone where it showed no layer."""
        if not self._energy:
            return None
        layers = range(len(self._meta.layers))
        return Statistics(tuple(map(self._query_energy, layers)), tuple(map(self._value_metric, layers)))

    def _query_energy(self, layer: int) -> Tensor | None:
        spec, energy = self._meta.layers[layer], self._energy.get(layer)
        if energy is None or energy.shape[-1] != spec.key_dim or energy.shape[0] % spec.kv_heads:
            return None
        shared = energy.reshape(spec.kv_heads, -1, spec.key_dim).sum(1) / self._tokens[layer]
        return shared if spec.rope is None else _pair_mean(shared, self._meta.ropes[spec.rope])

    def _value_metric(self, layer: int) -> Tensor | None:
        """Sum over the query heads of a key head of W_o^T W_o, ``[kv_heads, value_dim, value_dim]``.

        None where W_o is not found.
        """
        spec, energy = self._meta.layers[layer], self._energy.get(layer)
        if energy is None or energy.shape[0] % spec.kv_heads:
            return None
        for name in _OUTPUT_NAMES:
            weight = getattr(getattr(self.modules[layer], name, None), "weight", None)
            if isinstance(weight, torch.Tensor) and weight.shape[1:] == (energy.shape[0] * spec.value_dim,):
                per_head = weight.detach().float().reshape(weight.shape[0], spec.kv_heads, -1, spec.value_dim)
                return torch.einsum("okgd,okge->kde", per_head, per_head).cpu()
        return None


@contextmanager
def recording(recorder: QueryRecorder, model: PreTrainedModel) -> Iterator[None]:
    """Show the recorder every query that the model's attention receives while the block runs."""
    with _LOCK, ExitStack() as stack:
        if uses_sdpa(model):
            stack.enter_context(_watching_table(recorder))
        else:
            for modeling in _eager_modules(model):
                stack.enter_context(_watching_module(modeling, recorder))
        yield


@contextmanager
def _watching_table(recorder: QueryRecorder) -> Iterator[None]:
    table: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._local_mapping  # noqa: SLF001 - the only way back to what was there
    missing = object()
    before = table.get(SDPA, missing)
    table[SDPA] = _showing(ALL_ATTENTION_FUNCTIONS[SDPA], recorder)
    try:
        yield
    finally:
        if before is missing:
            del table[SDPA]
        else:
            table[SDPA] = before


@contextmanager
def _watching_module(modeling: Any, recorder: QueryRecorder) -> Iterator[None]:  # noqa: ANN401 - a modeling file
    before = getattr(modeling, _EAGER)
    setattr(modeling, _EAGER, _showing(before, recorder))
    try:
        yield
    finally:
        setattr(modeling, _EAGER, before)


def _showing(inner: Callable[..., Any], recorder: QueryRecorder) -> Callable[..., Any]:
    def show(module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        recorder.record(module, query)
        return inner(module, query, *args, **kwargs)

    return show


def _eager_modules(model: PreTrainedModel) -> list[Any]:
    """The modeling files whose plain attention this model may call."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if hasattr(sys.modules.get(name), _EAGER)]


def _pair_mean(energy: Tensor, regime: RopeRegime) -> Tensor:
    """Both halves of a rotated pair get their mean: positions will mix them."""
    width = regime.rotary_dim
    out = energy.clone()
    if regime.interleaved:
        pairs = out[:, :width].reshape(len(out), -1, 2).mean(2, keepdim=True)
        out[:, :width] = pairs.expand(-1, -1, 2).reshape(len(out), width)
    else:
        pairs = (out[:, : width // 2] + out[:, width // 2 : width]) / 2
        out[:, :width] = pairs.repeat(1, 2)
    return out


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation that the model runs."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)  # noqa: SLF001 - it has no public name


def uses_sdpa(model: PreTrainedModel) -> bool:
    """Whether the model's attention is torch's scaled_dot_product_attention."""
    return attention_of(model) == SDPA
