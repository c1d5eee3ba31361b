"""An engine that reads texts into tokens and computes nothing: for runs whose model runs elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvwire.engines.base import Engine
from kvwire.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvwire.engines.base import Place, Trust
    from kvwire.store import ModelRecord
    from kvwire.types import CacheMeta, KVCache


class ReadingEngine(Engine):
    """A model as its store's record and its tokenizer tell it; no weights are opened."""

    def __init__(self, record: ModelRecord, tokenize: Callable[[str, Place, Trust], list[int]]) -> None:
        """Keep both."""
        self._record, self._tokenize = record, tokenize

    @property
    def meta(self) -> CacheMeta:
        """Of the model's caches."""
        return self._record.meta

    @property
    def model_config_digest(self) -> str:
        """Of the model's configuration file."""
        return self._record.model_config_digest

    @property
    def device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of caches that were encoded last."""
        return getattr(torch, self._record.meta.dtype)  # type: ignore[no-any-return]

    @property
    def window(self) -> int:
        """Most tokens of a prompt."""
        return self._record.window

    @property
    def vocabulary_size(self) -> int:
        """Is not in the record."""
        return self._refuse()

    @property
    def has_tokenizer(self) -> bool:
        """It has one."""
        return True

    def tokenize(self, text: str, *, place: Place = "middle", trust: Trust = "document") -> list[int]:
        """Token ids of a piece of a prompt."""
        return self._tokenize(text, place, trust)

    def prefill(self, documents: Sequence[Sequence[int]]) -> list[KVCache]:
        """Refused."""
        del documents
        return self._refuse()

    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Refused."""
        del prefix, token_ids, offset
        return self._refuse()

    def past_key_values(self, cache: KVCache) -> Any:  # noqa: ANN401 - none
        """Refused."""
        del cache
        return self._refuse()

    def forward(self, past: Any, token_ids: Sequence[int], start: int, *, logits: int = 0) -> Tensor:  # noqa: ANN401
        """Refused."""
        del past, token_ids, start, logits
        return self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        msg = "the model runs in vLLM alone here, and only whole documents go there; encode without --engine vllm"
        raise MismatchError(msg)
