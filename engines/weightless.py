"""An engine without weights, for a model that runs elsewhere: it has the layout of caches, and computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvwire.engines.base import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvwire.engines.texts import Place, Trust
    from kvwire.errors import KvwireError
    from kvwire.types import CacheMeta, KVCache


class WeightlessEngine(Engine):
    """A model from its stored record, and perhaps its tokenizer."""

    def __init__(
        self, meta: CacheMeta, window: int, dtype: torch.dtype, refusal: KvwireError, *, model_config_digest: str = "",
        tokenize: Callable[[str, Place, Trust], list[int]] | None = None, opening: Sequence[int] = (),
        vocabulary_size: int | None = None,
    ) -> None:  # fmt: skip
        """Keep the parts; computing raises ``refusal``."""
        self._meta, self._window, self._dtype, self._refusal = meta, window, dtype, refusal
        self._model_config_digest, self._tokenize = model_config_digest, tokenize
        self._opening, self._vocabulary_size = tuple(opening), vocabulary_size

    @property
    def meta(self) -> CacheMeta:
        """Metadata of the model's caches."""
        return self._meta

    @property
    def model_config_digest(self) -> str:
        """Digest of the model's configuration file."""
        return self._model_config_digest

    @property
    def device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the caches."""
        return self._dtype

    @property
    def window(self) -> int:
        """Longest prompt in tokens."""
        return self._window

    @property
    def opening_tokens(self) -> tuple[int, ...]:
        """What the tokenizer puts before a whole text; nothing without one."""
        return self._opening

    @property
    def vocabulary_size(self) -> int:
        """Of the tokenizer; raises without one."""
        return self._refuse() if self._vocabulary_size is None else self._vocabulary_size

    @property
    def can_recompute(self) -> bool:
        """False: the model elsewhere computes missing chunks."""
        return False

    @property
    def has_tokenizer(self) -> bool:
        """Whether it has one."""
        return self._tokenize is not None

    def tokenize(self, text: str, *, place: Place = "middle", trust: Trust = "document") -> list[int]:
        """Tokenise a piece of a prompt."""
        return self._tokenize(text, place, trust) if self._tokenize else self._refuse()

    def prefill(self, documents: Sequence[Sequence[int]]) -> list[KVCache]:
        """Refused."""
        return self._refuse(documents)

    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Refused."""
        return self._refuse(prefix, token_ids, offset)

    def past_key_values(self, cache: KVCache) -> Any:  # noqa: ANN401 - as declared
        """Refused."""
        return self._refuse(cache)

    def forward(self, past: Any, token_ids: Sequence[int], start: int, *, logits: int = 0) -> Tensor:  # noqa: ANN401
        """Refused."""
        return self._refuse(past, token_ids, start, logits)

    def _refuse(self, *_: object) -> NoReturn:
        raise self._refusal
