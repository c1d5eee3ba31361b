"""Which corpus is opened for an engine that is configured by names and values, such as vLLM and LMCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvwire.runtime.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """A store, a tenant and a model, under the names that users give them.

    Attributes:
        store: Address of the store.
        model: Name of the model in the store's record, or first digits of its revision; empty where there is one.
        token: Bearer token of http stores.
        tenant: Whose documents.
        salt: The deployment's secret.
        keys: File of master keys.
        cache: Folder of a cache before the store.
        cache_size: Of that folder.
        memory_size: Of a cache in memory.
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
