"""What a store says of the model behind one configuration, so that its documents can be read without the model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from kvwire._json import Sha256OrEmpty, check_version, json_object, record
from kvwire.errors import CorruptError
from kvwire.store.catalog_entry import MAX_ENTRY_BYTES

if TYPE_CHECKING:
    from kvwire.types import CacheMeta

VERSION = 1
_WHAT, _ADVICE = "a model record", "encode any document again, which writes it anew"
_MOST_TOKENS = 1 << 32


class _Stored(Struct):
    config_digest: str
    meta: dict[str, Any]
    window: Annotated[int, Meta(gt=0, lt=_MOST_TOKENS)]
    model_config_digest: Sha256OrEmpty
    profile_digest: Sha256OrEmpty


@dataclass(frozen=True)
class ModelRecord:
    """One model, as its caches need it. JSON in a store; docs/format.md tells the fields.

    Attributes:
        meta: Of all caches of the configuration, positions on and from 0; its dtype is that of the last writer's.
        window: Most tokens that a prompt may hold.
        model_config_digest: SHA-256 of the model's own configuration file; empty where the engine has none.
        profile_digest: SHA-256 of the profile in use when the record was written; empty where there was none.
    """

    meta: CacheMeta
    window: int
    model_config_digest: str = ""
    profile_digest: str = ""

    def to_json(self) -> bytes:
        """The bytes to store; the same for the same record."""
        from kvwire.codec.format.metadata_json import meta_to_json

        fields = {
            "version": VERSION,
            "config_digest": self.meta.config_digest(),
            "meta": meta_to_json(replace(self.meta, token_digest="")),
            "window": self.window,
            "model_config_digest": self.model_config_digest,
            "profile_digest": self.profile_digest,
        }
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ModelRecord:
        """Read ``to_json``.

        Args:
            data: As stored.

        Returns:
            The record.

        Raises:
            CorruptError: A field is missing or impossible, or the record contradicts itself.
            FormatVersionError: A later version wrote it.
        """
        from kvwire.codec.format.metadata_json import meta_from_json

        fields = check_version(json_object(data, _WHAT, MAX_ENTRY_BYTES), VERSION, _WHAT)
        stored = record(fields, _Stored, _WHAT, _ADVICE)
        meta = replace(meta_from_json(stored.meta), positions="on")
        if meta.config_digest() != stored.config_digest:
            msg = f"{_WHAT} contradicts itself: {_ADVICE}"
            raise CorruptError(msg)
        return cls(meta, stored.window, stored.model_config_digest, stored.profile_digest)
