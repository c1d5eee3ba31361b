"""Which pages vLLM has for each layer, and how they hold numbers. Imports vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvwire.errors import ArgumentError, MismatchError

from .pages import (
    DTYPES,
    RANK,
    BlockTable,
    PackedPages,
    PageFormat,
    StridedPages,
    layers_with_rows,
    pairs_of_halves,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

    from kvwire.types import CacheMeta, LayerSpec

    from .pages import Pages
    from .save_scheduling import SaveMode

_KINDS = {
    FullAttentionSpec: (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR),
    SlidingWindowSpec: (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR),
    MLAAttentionSpec: (KVQuantMode.NONE,),
}
"""Pages that documents are loaded into, and how these may hold numbers."""
_PAIRED = ("deepseek_v2", "deepseek_v3")
"""Models with latent attention whose rotated numbers vLLM keeps pair by pair; of V3 transformers keeps first all first
numbers of the pairs, then all second ones."""


def check_groups(config: KVCacheConfig, save: SaveMode = "off") -> None:
    """Refuse pages that documents cannot be loaded into, and those that keep too little to be saved."""
    kinds = [(name, spec) for group in config.kv_cache_groups for name, spec in _specs(group)]
    for name, spec in kinds:
        mode = getattr(spec, "kv_quant_mode", KVQuantMode.NONE)
        if type(spec) not in _KINDS:
            kind = type(spec).__name__.removesuffix("Spec")
            raise ArgumentError(
                f"{name} has pages of the kind {kind}; kvwire loads into those of full, sliding-window and latent "
                "attention alone: serve this model without documents"
            )
        if mode not in _KINDS[type(spec)]:
            ways = "auto or fp8" if len(_KINDS[type(spec)]) > 1 else "auto"
            msg = f"{name} has pages of {mode.name}, which kvwire does not write: serve with --kv-cache-dtype {ways}"
            raise ArgumentError(msg)
    slides, groups = any(isinstance(spec, SlidingWindowSpec) for _, spec in kinds), len(config.kv_cache_groups)
    if save != "off" and (slides or groups > 1):
        is_mixed = any(isinstance(spec, FullAttentionSpec) for _, spec in kinds)
        ways = "start vLLM with --disable-hybrid-kv-cache-manager, or " if is_mixed else ""
        raise ArgumentError(
            f"vLLM gives away the rows that a sliding window has left, so no prompt can be saved: {ways}leave save out"
        )


def register_pages(
    kv_caches: Mapping[str, Tensor], config: KVCacheConfig, vllm: VllmConfig, meta: CacheMeta
) -> tuple[Pages, list[BlockTable]]:
    """Pages of the layers that have rows, and the lists of blocks that they lie in."""
    modules: Mapping[str, Any] = vllm.compilation_config.static_forward_context
    own = [name for name in kv_caches if getattr(modules.get(name), "kv_sharing_target_layer_name", None) is None]
    caches = {extract_layer_index(name): (name, kv_caches[name]) for name in own}
    layers = layers_with_rows(meta)
    if len(caches) != len(own) or set(caches) != set(layers):
        msg = f"vLLM has pages of {len(own)} layers, the documents are of {len(layers)}: name their model"
        raise MismatchError(msg)
    named, specs = [caches[layer] for layer in layers], [meta.layers[layer] for layer in layers]
    views, dims = [view for _, view in named], [spec.key_dim for spec in specs]
    is_latent = any(spec.value_rope is not None for spec in specs)
    if is_latent:
        views = [view if view.ndim == RANK else view.unsqueeze(1) for view in views]  # all heads share a latent
        forms = [_latent_form(spec, meta, vllm.model_config.hf_text_config.model_type) for spec in specs]
    else:
        forms = [_form(view, modules.get(name), vllm.model_config.dtype) for name, view in named]
    place = {name: at for at, (name, _) in enumerate(named)}
    tables = [_table(group, place) for group in config.kv_cache_groups]
    if is_latent or views[0].device.type != "cpu":
        return StridedPages(views, dims, forms), tables
    return PackedPages(views, dims, _cpu_kernel, forms), tables


def _specs(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        yield from group.kv_cache_spec.kv_cache_specs.items()
    else:
        yield from ((name, group.kv_cache_spec) for name in group.layer_names)


def _table(group: KVCacheGroupSpec, place: Mapping[str, int]) -> BlockTable:
    layers = tuple(place[name] for name in group.layer_names if name in place)
    is_whole = not any(isinstance(spec, SlidingWindowSpec) for _, spec in _specs(group))
    return BlockTable(layers, group.kv_cache_spec.block_size, is_whole)


def _form(view: Tensor, module: Any, given: torch.dtype) -> PageFormat:  # noqa: ANN401 - a layer of vLLM's
    kind = str(getattr(module, "kv_cache_dtype", ""))
    if view.dtype in DTYPES or not kind.startswith("fp8"):
        return PageFormat()
    if module._k_scale.numel() > 1 or module._v_scale.numel() > 1:  # noqa: SLF001 - they have no other name
        raise MismatchError(
            "the model has a scale of fp8 for each head, which kvwire does not write: serve with --kv-cache-dtype auto"
        )
    dtype = torch.float8_e5m2 if kind == "fp8_e5m2" else current_platform.fp8_dtype()
    return PageFormat(dtype, given, float(module._k_scale_float), float(module._v_scale_float))  # noqa: SLF001 - they have no other name


def _latent_form(spec: LayerSpec, meta: CacheMeta, model_type: str) -> PageFormat:
    rope = None if spec.value_rope is None else meta.ropes[spec.value_rope]
    if rope is None or rope.rotary_dim != spec.value_dim or model_type not in _PAIRED:
        raise MismatchError(
            f"kvwire does not know how vLLM keeps the latents of a {model_type}, only of {' and '.join(_PAIRED)}: "
            "serve this model without documents"
        )
    return PageFormat() if rope.interleaved else PageFormat(order=pairs_of_halves(spec.value_dim))


def _cpu_kernel(view: Tensor, slots: Tensor, keys: Tensor, values: Tensor, form: PageFormat) -> None:
    """Write as vLLM does on a processor."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    blocks, heads, tokens, width = view.shape
    key_pages, value_pages = view.view(blocks, heads, tokens * 2, width // 2).chunk(2, dim=2)
    kind = {None: "auto", torch.float8_e5m2: "fp8_e5m2"}.get(form.dtype, "fp8")
    isa = _get_attn_isa(form.given or view.dtype, tokens, width // 2, kind)
    cpu_attn_reshape_and_cache(keys, values, key_pages, value_pages, slots, isa, form.key_scale, form.value_scale, kind)
