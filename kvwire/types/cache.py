"""The KV cache of one document and what is known about it."""

from __future__ import annotations

import hashlib
import json
import operator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, SupportsIndex

import numpy as np

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from kvwire.types.ragged import Entries

LayerKind = Literal["full", "sliding", "none"]
Positions = Literal["on", "off"]
Side = Literal["key", "value"]


@dataclass(frozen=True)
class RopeRegime:
    """How positions were rotated into keys (RoFormer, arXiv 2104.09864), for any frequencies.

    Attributes:
        inv_freq: Radians per token of each rotated pair, float32 values, after linear, llama3 or yarn scaling.
        interleaved: Pairs are (2j, 2j + 1); otherwise (j, j + rotary_dim / 2).
        attention_scaling: Factor that the model multiplies into cos and sin (yarn, longrope). Rotating further
            preserves it.
        max_positions: Positions at and beyond this use other frequencies (dynamic, longrope); None: no such limit.
        kind: The rule's usual name, for messages.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    attention_scaling: float = 1.0
    max_positions: int | None = None
    kind: str = "default"

    def __post_init__(self) -> None:
        """Refuse a regime without frequencies."""
        if not self.inv_freq:
            msg = "a RoPE regime needs at least one frequency; use rope=None for layers without positions"
            raise ArgumentError(msg)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions, contiguous; the rest pass through (partial rotary)."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class LayerSpec:
    """Shape and kind of one layer's cache.

    Attributes:
        kv_heads: Heads of keys and values.
        key_dim: Elements of a key in one head.
        value_dim: Elements of a value in one head.
        kind: ``full`` or ``sliding`` attention, or ``none`` for a layer without keys and values.
        rope: Index into ``CacheMeta.ropes``; None if keys carry no position that can be removed.
        window: Tokens that a sliding layer attends to, itself included.
        value_rope: The same index for values that carry positions: multi-head latent attention (DeepSeek-V2, arXiv
            2405.04434) caches its latent as keys and the rotated part, which all heads share, as values.
        key_rope_start: First rotated key dimension; above 0 if the rotary part comes last.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    kind: LayerKind = "full"
    rope: int | None = None
    window: int | None = None
    value_rope: int | None = None
    key_rope_start: int = 0

    def rotary(self, side: Side) -> tuple[int, int] | None:
        """Regime index and first rotated dimension of keys or values; None if they carry no position."""
        index, start = (self.rope, self.key_rope_start) if side == "key" else (self.value_rope, 0)
        return None if index is None else (index, start)

    @property
    def key_width(self) -> int:
        """Key elements for one token."""
        return self.kv_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Value elements for one token."""
        return self.kv_heads * self.value_dim


@dataclass(frozen=True)
class CacheMeta:
    """Metadata of a cache: its model, layout and positions.

    Attributes:
        model_id: A name for messages.
        model_revision: A digest of the weights.
        tokenizer_digest: SHA-256 of the tokenizer's files, or the empty string.
        dtype: The torch dtype of the stored tensors, by name (``bfloat16``).
        layers: One entry per layer, in order; empty: inferred from the tensors.
        ropes: The distinct rotary regimes that layers refer to.
        positions: ``on``: keys are rotated at positions offset, offset + 1, ...; ``off``: keys are un-rotated.
        offset: Position of the first token.
        token_digest: SHA-256 of the token ids as little-endian uint32, or the empty string.
    """

    model_id: str = ""
    model_revision: str = ""
    tokenizer_digest: str = ""
    dtype: str = "float32"
    layers: tuple[LayerSpec, ...] = ()
    ropes: tuple[RopeRegime, ...] = ()
    positions: Positions = "on"
    offset: int = 0
    token_digest: str = ""

    def config_digest(self) -> str:
        """SHA-256 over all that two caches must share to be linked into one prompt.

        The model's name counts only if its weights' digest is unknown. The dtype never counts: a blob decodes into any.
        """
        fields: dict[str, object] = {name: getattr(self, name) for name in self._shared}
        fields["layers"] = [_plain(layer) for layer in self.layers]
        fields["ropes"] = [
            {**_plain(rope), "inv_freq": [f"{value:.5e}" for value in rope.inv_freq]}  # their last bits may differ
            for rope in self.ropes
        ]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def shares_config(self, other: CacheMeta) -> bool:
        """Whether two caches may be linked: whether their ``config_digest`` is the same.

        Args:
            other: Of the other cache.

        Returns:
            Whether they may; equal fields need no digest.
        """
        mine, theirs = ([getattr(each, name) for name in self._shared] for each in (self, other))
        return mine == theirs or self.config_digest() == other.config_digest()

    @property
    def _shared(self) -> tuple[str, ...]:
        """Names of the fields in the digest."""
        named = () if self.model_revision else ("model_id",)
        return (*named, "model_revision", "tokenizer_digest", "layers", "ropes")

    @property
    def elements_per_token(self) -> int:
        """Numbers cached for one token, keys and values of all layers."""
        return sum(layer.key_width + layer.value_width for layer in self.layers)


def _plain(described: LayerSpec | RopeRegime) -> dict[str, object]:
    """Its fields by name."""
    return {field.name: getattr(described, field.name) for field in fields(described)}


def plain_token_ids(token_ids: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Token ids as Python integers, from any iterable."""
    if isinstance(token_ids, bytes | bytearray):
        raise ArgumentError("token ids must be integers, got bytes: decode them to text first")
    listed = getattr(token_ids, "tolist", None)
    try:
        return tuple(map(operator.index, listed() if listed else token_ids))
    except TypeError as error:
        raise ArgumentError(f"token ids must be integers, one after another: {error}") from None


def digest_tokens(token_ids: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian uint32; the same in every process and on every machine.

    Args:
        token_ids: Each fits 32 bits.

    Returns:
        Hexadecimal digest.

    Raises:
        ArgumentError: An id does not fit 32 bits.
    """
    if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < 1 << 32):
        raise ArgumentError("token ids must lie in 0 to 2^32 - 1")
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one document, layer by layer.

    Attributes:
        keys: Of each layer, ``[kv_heads, tokens, key_dim]``, any float dtype, any device; empty for a layer of kind
            ``none``.
        values: Of each layer, ``[kv_heads, tokens, value_dim]``, likewise.
        meta: Model, layout and positions.
        token_ids: The document's own tokens, or None where unknown.
        kept: Masks of a pruned cache, bool ``[kv_heads, tokens]`` for each layer, None for a complete layer and for a
            complete cache. Entries that are false hold zeros.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    meta: CacheMeta
    token_ids: tuple[int, ...] | None = None
    kept: tuple[torch.Tensor | None, ...] | None = None

    @classmethod
    def from_tensors(
        cls,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        meta: CacheMeta | None = None,
        token_ids: Sequence[int] | None = None,
        *,
        kept: Sequence[torch.Tensor | None] | None = None,
    ) -> KVCache:
        """Build a cache from lists of tensors, one for each layer, without an engine.

        Args:
            keys: ``[heads, tokens, key_dim]`` for each layer.
            values: ``[heads, tokens, value_dim]`` for each layer.
            meta: Layout and dtype are inferred from the tensors if missing.
            token_ids: The document's own tokens; None if not known.
            kept: Bool ``[heads, tokens]`` for each layer, None for all; false entries become zeros.

        Returns:
            The cache, which holds these tensors.

        Raises:
            ArgumentError: Shapes disagree with each other, with ``meta`` or with ``token_ids``, which must be integers.
        """
        meta = meta or CacheMeta()
        if len(keys) != len(values) or not keys:
            raise ArgumentError(
                f"a cache needs as many key as value tensors and at least one layer, got {len(keys)} and {len(values)}"
            )
        if not meta.layers:
            rope = 0 if meta.ropes else None
            meta = replace(meta, layers=tuple(_spec_of(k, v, rope) for k, v in zip(keys, values, strict=True)))
            meta = replace(meta, dtype=str(keys[0].dtype).removeprefix("torch."))
        ids = None if token_ids is None else plain_token_ids(token_ids)
        if ids is not None:
            meta = replace(meta, token_digest=digest_tokens(ids))
        cache = cls(list(keys), list(values), meta, ids)
        cache._check_shapes()
        return cache if kept is None else cache._pruned(kept)

    @classmethod
    def zeros(cls, meta: CacheMeta, tokens: int, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> KVCache:
        """Allocate a prompt's cache: positions on and from 0, no token ids."""
        import torch

        shapes = [(spec, 0 if spec.kind == "none" else tokens) for spec in meta.layers]
        keys = [torch.zeros(s.kv_heads, n, s.key_dim, dtype=dtype, device=device) for s, n in shapes]
        values = [torch.zeros(s.kv_heads, n, s.value_dim, dtype=dtype, device=device) for s, n in shapes]
        placed = replace(meta, positions="on", offset=0, token_digest="", dtype=str(dtype).removeprefix("torch."))
        return cls(keys, values, placed)

    @classmethod
    def from_ragged(
        cls,
        layers: Sequence[Sequence[Entries]],
        tokens: int,
        meta: CacheMeta | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> KVCache:
        """Build a pruned cache, whose heads keep different tokens.

        Args:
            layers: For each layer and head its positions in the document, int64 ``[n]`` ascending, its keys ``[n,
                key_dim]`` and its values ``[n, value_dim]``; n may differ from head to head and may be 0. A layer
                without heads has no cache.
            tokens: Of the document.
            meta: Layout and dtype are inferred from the tensors if missing.
            token_ids: The document's own tokens; None if not known.

        Returns:
            The cache, with zeros for pruned entries.

        Raises:
            ArgumentError: Positions do not ascend or exceed the document, or shapes disagree.
        """
        from kvwire.types.ragged import dense_layer

        if tokens < 1:
            raise ArgumentError(f"a document has at least one token, got {tokens}")
        dense = [dense_layer(index, heads, tokens) for index, heads in enumerate(layers)]
        keys, values, masks = ([parts[side] for parts in dense] for side in range(3))
        meta = meta or CacheMeta()
        if not meta.layers and dense:
            rope = 0 if meta.ropes else None
            specs = tuple(_spec_of(k, v, rope) for k, v in zip(keys, values, strict=True))
            dtype = next((key.dtype for key in keys if key.numel()), keys[0].dtype)
            meta = replace(meta, layers=specs, dtype=str(dtype).removeprefix("torch."))
        return cls.from_tensors(keys, values, meta, token_ids, kept=masks)

    def ragged(self, layer: int, head: int) -> Entries:
        """Entries of one head: positions in the document, int64 ``[n]``, keys and values ``[n, dim]``.

        Args:
            layer: Number of the layer.
            head: Number of the head.

        Returns:
            Positions, keys and values.
        """
        from kvwire.types.ragged import entries_of

        if not (0 <= layer < len(self.keys) and 0 <= head < self.meta.layers[layer].kv_heads):
            raise ArgumentError(f"this cache of {len(self.keys)} layers has no head {head} in layer {layer}")
        mask = None if self.kept is None else self.kept[layer]
        return entries_of(self.keys[layer][head], self.values[layer][head], None if mask is None else mask[head])

    def _pruned(self, kept: Sequence[torch.Tensor | None]) -> KVCache:
        """Set pruned entries to zero and record the masks."""
        if len(kept) != len(self.keys):
            msg = f"kept names {len(kept)} layers, the cache has {len(self.keys)}; pass None for layers kept whole"
            raise ArgumentError(msg)
        from kvwire.types.ragged import check_mask, masked

        masks = [None if spec.kind == "none" else mask for spec, mask in zip(self.meta.layers, kept, strict=True)]
        for layer, (spec, mask) in enumerate(zip(self.meta.layers, masks, strict=True)):
            check_mask(layer, mask, (spec.kv_heads, self.tokens))
        keys = [masked(tensor, mask) for tensor, mask in zip(self.keys, masks, strict=True)]
        values = [masked(tensor, mask) for tensor, mask in zip(self.values, masks, strict=True)]
        return replace(self, keys=keys, values=values, kept=tuple(masks) if any(m is not None for m in masks) else None)

    def _check_shapes(self) -> None:
        if len(self.meta.layers) != len(self.keys):
            raise ArgumentError(f"the meta names {len(self.meta.layers)} layers, the tensors are of {len(self.keys)}")
        tokens = self.tokens
        for index, (spec, key, value) in enumerate(zip(self.meta.layers, self.keys, self.values, strict=True)):
            if spec.kind == "none":
                continue
            expected = ((spec.kv_heads, tokens, spec.key_dim), (spec.kv_heads, tokens, spec.value_dim))
            got = (tuple(key.shape), tuple(value.shape))
            if got != expected:
                raise ArgumentError(
                    f"layer {index}: keys and values must be {expected[0]} and {expected[1]}, got {got[0]} and {got[1]}"
                )
        if self.token_ids is not None and len(self.token_ids) != tokens:
            raise ArgumentError(f"{len(self.token_ids)} token ids for a cache of {tokens} tokens")

    @property
    def tokens(self) -> int:
        """Number of tokens of the document, pruned ones included."""
        for spec, key in zip(self.meta.layers, self.keys, strict=True):
            if spec.kind != "none":
                return int(key.shape[1])
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors occupy."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def slice(self, start: int, stop: int) -> KVCache:
        """Tokens ``start`` to ``stop`` as views; positions keep their absolute values through ``meta.offset``.

        Args:
            start: First token.
            stop: One after the last token.

        Returns:
            A cache that shares the tensors.
        """
        ids = None if self.token_ids is None else self.token_ids[start:stop]
        meta = replace(
            self.meta, offset=self.meta.offset + start, token_digest="" if ids is None else digest_tokens(ids)
        )
        keys = [key[:, start:stop] if key.ndim == _RANK else key for key in self.keys]
        values = [value[:, start:stop] if value.ndim == _RANK else value for value in self.values]
        masks = None
        if self.kept is not None:
            masks = tuple(None if mask is None else mask[:, start:stop] for mask in self.kept)
        return KVCache(keys, values, meta, ids, masks)


_RANK = 3  # [heads, tokens, dim]


def _spec_of(key: torch.Tensor, value: torch.Tensor, rope: int | None) -> LayerSpec:
    if key.ndim != _RANK or value.ndim != _RANK:
        msg = f"a layer's keys and values must be [heads, tokens, dim], got {tuple(key.shape)} and {tuple(value.shape)}"
        raise ArgumentError(msg)
    heads, key_dim, value_dim = int(key.shape[0]), int(key.shape[2]), int(value.shape[2])
    return LayerSpec(heads, key_dim, value_dim, rope=rope) if heads else LayerSpec(0, 0, 0, "none")
