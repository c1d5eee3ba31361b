"""Models by their shape: what a token's cache holds and what computing it costs."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.errors import ArgumentError, NotFoundError

BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's shape, as its published configuration gives it.

    Attributes:
        name: For tables and logs.
        layers: How many.
        hidden: Width of the residual stream.
        heads: Of attention.
        kv_heads: Heads of keys and values.
        key_dim: Elements of a key in one head.
        value_dim: Elements of a value in one head.
        parameters: All of them, read in every pass of many tokens.
        active_parameters: Those that one token uses.
        latent_elements: What the cache keeps of one token in one layer where attention is latent (MLA); 0: keys and
            values of ``kv_heads`` heads.
        weight_bytes: Of one parameter as served.
        experts: The feed-forward layers are mixtures of experts.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    parameters: float
    active_parameters: float
    latent_elements: int = 0
    weight_bytes: int = BF16_BYTES
    experts: bool = False

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be."""
        counts = (self.layers, self.hidden, self.heads, self.kv_heads, self.key_dim, self.value_dim, self.weight_bytes)
        if min(counts) < 1 or self.latent_elements < 0 or not 0 < self.active_parameters <= self.parameters:
            raise ArgumentError(f"the shape of {self.name} has counts below 1, or more active parameters than it has")

    @property
    def cache_elements(self) -> int:
        """Elements that the cache keeps of one token, all layers."""
        return self.layers * (self.latent_elements or self.kv_heads * (self.key_dim + self.value_dim))

    @property
    def cache_bytes(self) -> int:
        """Bytes of one token's cache in bfloat16."""
        return BF16_BYTES * self.cache_elements

    @property
    def token_flops(self) -> float:
        """Operations that a token costs apart from attention: a multiplication and an addition for each parameter."""
        return 2 * self.active_parameters

    @property
    def pair_flops(self) -> float:
        """Operations for one pair of a token and a token that it attends to: scores and weighted sum, all heads."""
        return 2 * self.layers * self.heads * (self.key_dim + self.value_dim)

    def prefill_flops(self, tokens: int, context: int = 0) -> float:
        """Count the operations of a forward pass under a causal mask."""
        return tokens * (self.token_flops + self.pair_flops * (context + tokens / 2))


DEMO = Model(
    name="demo", layers=6, hidden=384, heads=4, kv_heads=2, key_dim=128, value_dim=128,
    parameters=13_767_552, active_parameters=13_767_552,
)  # fmt: skip
LLAMA_3_1_8B = Model(
    name="llama-3.1-8b", layers=32, hidden=4096, heads=32, kv_heads=8, key_dim=128, value_dim=128,
    parameters=8.03e9, active_parameters=8.03e9,
)  # fmt: skip
LLAMA_3_1_70B = Model(
    name="llama-3.1-70b", layers=80, hidden=8192, heads=64, kv_heads=8, key_dim=128, value_dim=128,
    parameters=70.55e9, active_parameters=70.55e9,
)  # fmt: skip
QWEN3_8B = Model(
    name="qwen3-8b", layers=36, hidden=4096, heads=32, kv_heads=8, key_dim=128, value_dim=128,
    parameters=8.19e9, active_parameters=8.19e9,
)  # fmt: skip
QWEN3_32B = Model(
    name="qwen3-32b", layers=64, hidden=5120, heads=64, kv_heads=8, key_dim=128, value_dim=128,
    parameters=32.76e9, active_parameters=32.76e9,
)  # fmt: skip
# Attention in prefill runs over expanded heads of 128 + 64 rotated elements and values of 128; the cache keeps a latent
# of 512 elements and the 64 rotated ones. Weights are published in 8 bits (arXiv 2412.19437).
DEEPSEEK_V3 = Model(
    name="deepseek-v3", layers=61, hidden=7168, heads=128, kv_heads=128, key_dim=192, value_dim=128,
    parameters=671e9, active_parameters=37e9, latent_elements=576, weight_bytes=1, experts=True,
)  # fmt: skip

MODELS = {
    model.name: model for model in (DEMO, LLAMA_3_1_8B, LLAMA_3_1_70B, QWEN3_8B, QWEN3_32B, DEEPSEEK_V3)
}  # fmt: skip


def model_named(name: str) -> Model:
    """Look up a model's shape.

    Args:
        name: One of ``MODELS``.

    Returns:
        The shape.

    Raises:
        NotFoundError: There is no such model; the message lists those there are.
    """
    if name not in MODELS:
        msg = f"no model is called {name!r} here; choose one of {', '.join(MODELS)}, or make a Model of its shape"
        raise NotFoundError(msg)
    return MODELS[name]
