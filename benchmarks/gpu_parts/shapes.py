"""Cache shapes of known models, and what their prefill is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvwire.codec.format.metadata_json import elements_per_token
from kvwire.types import CacheMeta, LayerSpec, RopeRegime

BYTES = 2
"""Of a bfloat16."""


@dataclass(frozen=True)
class Latent:
    """What multi-head latent attention has beside its cache: ranks and widths of a head."""

    query_rank: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Shape:
    """A decoder: its cache, and the matrices that prefill multiplies with.

    kv_heads, key_dim, value_dim: of one layer's cache; with ``latent`` the keys hold the latent and the values the
    rotated part. heads: of queries. kind: ``llama``, ``qwen3`` or ``deepseek``. note: what the prefill leaves out.
    """

    name: str
    title: str
    kind: str
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    theta: float
    latent: Latent | None = None
    note: str = ""

    @property
    def width(self) -> int:
        """Elements of the cache for one token."""
        return elements_per_token(self.specs)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """One entry for each layer, all alike."""
        rotary = {"rope": 0} if self.latent is None else {"value_rope": 0}
        return (LayerSpec(self.kv_heads, self.key_dim, self.value_dim, **rotary),) * self.layers

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the bfloat16 cache."""
        return BYTES * tokens * self.width

    def meta(self, dtype: str) -> CacheMeta:
        """Layout of a cache at positions from 0. Frequencies are those of plain RoPE, scaled by no rule."""
        dim = self.key_dim if self.latent is None else self.value_dim
        inverse = self.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        rope = RopeRegime(tuple(float(np.float32(value)) for value in inverse))
        return CacheMeta(
            model_id=f"synthetic {self.name}",
            model_revision=f"synthetic {self.name}",
            dtype=dtype,
            layers=self.specs,
            ropes=(rope,),
        )


SHAPES = (
    Shape("llama-3.1-8b", "Llama 3.1 8B", "llama", 32, 8, 128, 128, 4096, 32, 14336, 128256, 5e5),
    Shape(
        "llama-3.1-70b-tp8", "Llama 3.1 70B, 1/8", "llama", 80, 1, 128, 128, 8192, 8, 3584, 16032, 5e5,
        note="one of eight tensor-parallel shards: an eighth of heads, of the feed-forward width and of the "
        "vocabulary; the all-reduces between shards are left out, which favours prefill",
    ),
    Shape("qwen3-32b", "Qwen3 32B", "qwen3", 64, 8, 128, 128, 5120, 64, 25600, 151936, 1e6),
    Shape(
        "deepseek-v3", "DeepSeek V3", "deepseek", 61, 1, 512, 64, 7168, 128, 18432, 129280, 1e4,
        latent=Latent(1536, 128, 128),
        note="the experts of a layer are replaced by one dense layer as wide as the nine that a token meets "
        "(9 x 2048 = 18432, the width of the model's own dense layers); routing and exchange between devices are left "
        "out, which favours prefill",
    ),
)  # fmt: skip


def named(name: str) -> Shape:
    """A shape by its name; raises SystemExit naming those that exist."""
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise SystemExit(f"no shape {name!r}; there are {', '.join(shape.name for shape in SHAPES)}")


def tiny(shape: Shape, layers: int = 2) -> Shape:
    """The same kind of model in small: what an interpreter gets through in seconds."""
    latent = None if shape.latent is None else Latent(16, 8, 8)
    return replace(
        shape,
        name=f"tiny {shape.name}",
        title=f"{shape.title}, tiny",
        layers=layers,
        kv_heads=min(shape.kv_heads, 2),
        key_dim=8 if latent is None else 16,
        value_dim=8,
        hidden=32,
        heads=4,
        intermediate=48,
        vocabulary=64,
        latent=latent,
    )
