"""Opens corpora for adapters that are configured by names and values, such as vLLM's and LMCache's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from kvwire.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.runtime.corpus import Corpus
    from kvwire.types import CacheMeta


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """A store, a tenant and a model, by their names in users' settings.

    Attributes:
        store: Address of the store.
        model: Model name in the store's record, or first digits of its revision; empty if there is only one.
        token: Bearer token of http stores.
        tenant: Owner of the documents.
        salt: The deployment's secret.
        keys: File of master keys.
        cache: Folder of a cache in front of the store.
        cache_size: Size of that folder.
        memory_size: Size of a cache in memory.
    """

    store: str
    model: str = ""
    token: str | None = None
    tenant: str = "default"
    salt: str = ""
    keys: str | None = None
    cache: str | None = None
    cache_size: str = "10GB"
    memory_size: str | None = None

    def open_corpus(self, model: str) -> Corpus:
        """Open the corpus, without an engine."""
        from kvwire.runtime.corpus import Corpus
        from kvwire.store import Keyring
        from kvwire.store.schemes import open_store

        store = open_store(
            self.store, token=self.token, cache=self.cache, cache_size=self.cache_size, memory_size=self.memory_size
        )
        keyring = Keyring.read(self.keys) if self.keys else None
        return Corpus.open(store, model=model, tenant=self.tenant, salt=self.salt.encode(), keyring=keyring)


LOSSLESS, FINEST = "lossless", "finest"


@dataclass(frozen=True, kw_only=True)
class ChunkSettings(CorpusSettings):
    """Settings of an adapter and its corpus.

    Attributes:
        served_as: The engine's name of the model; empty: the name in the store's record.
        chunk_tokens: Tokens per hashed chunk of the engine.
        level: Level to serve: ``lossless``, ``finest`` (of the lossy ones), or a level's name or index.
        cache_salt: Serve only requests with this salt; None: only those without one.
        cpu_block: Tokens per block of vLLM on a processor in float32; else 0.
        lossy_for_all: Serve a lossy level to all requests that begin with a document.
    """

    chunk_tokens: int
    served_as: str = ""
    level: int | str = LOSSLESS
    cache_salt: str | None = None
    cpu_block: Annotated[int, msgspec.Meta(ge=0)] = 0
    lossy_for_all: bool = False

    @classmethod
    def read(cls, parameters: Mapping[str, Any], chunk_tokens: int, *, salted: bool) -> ChunkSettings:
        """Parse an adapter's parameters."""
        names = sorted(set(cls.__dataclass_fields__) - (set() if salted else {"cache_salt", "cpu_block"}))
        if unknown := sorted(set(parameters) - set(names)):
            raise ArgumentError(f"kvwire's adapter has no setting {unknown[0]!r}; it may have {', '.join(names)}")
        if not parameters.get("store"):
            raise ArgumentError('name the store of the documents: {"store": "file:///folder"}')
        given = {name: value for name, value in parameters.items() if value is not None}  # null: left out
        try:
            settings = msgspec.convert({"chunk_tokens": chunk_tokens, **given}, cls)
        except msgspec.ValidationError as error:
            raise ArgumentError(f"kvwire's adapter: {error}; see docs/how-to for its settings") from error
        settings.check_pollution(salted=salted)
        return settings

    def check_pollution(self, *, salted: bool) -> None:
        """Refuse to serve inexact caches to requests that did not ask for them."""
        if self.level == LOSSLESS or self.cache_salt or self.lossy_for_all:
            return
        way = 'give "cache_salt", which requests then send, or ' if salted else ""
        raise ArgumentError(
            f"level {self.level!r} is not lossless, and every prompt that begins with a document would get it: {way}"
            'say "lossy_for_all": true, or serve "level": "lossless"'
        )

    def corpus(self) -> Corpus:
        """Open the documents' corpus, without an engine."""
        return self.open_corpus(self.model)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def uniform(meta: CacheMeta) -> tuple[int, int]:
    """KV heads and dimension of a model with uniform layers."""
    shapes = {(spec.kv_heads, spec.key_dim, spec.value_dim, spec.kind, spec.value_rope) for spec in meta.layers}
    plain = [shape for shape in shapes if shape[1] == shape[2] and shape[3:] == ("full", None)]
    if len(shapes) != 1 or not plain:
        raise MismatchError(
            f"model {meta.model_id!r} has layers of several kinds, or latent attention: kvwire's adapters serve models "
            "whose layers all have full attention with keys and values of one shape"
        )
    return plain[0][:2]


def heads_of(kv_heads: int, workers: int, worker: int) -> slice:
    """KV heads of a tensor-parallel worker; workers share heads if there are fewer."""
    if not 0 <= worker < workers or (kv_heads % workers and workers % kv_heads):
        raise ArgumentError(f"{kv_heads} key-value heads cannot be divided among {workers} workers")
    each = max(1, kv_heads // workers)
    first = worker * kv_heads // workers
    return slice(first, first + each)
