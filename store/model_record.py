"""What a store says of the model behind one configuration, so that its documents can be read without the model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvwire._json import json_field, json_object
from kvwire.errors import CorruptError, FormatVersionError
from kvwire.store.catalog_entry import MAX_ENTRY_BYTES

if TYPE_CHECKING:
    from kvwire.types import CacheMeta

VERSION = 1
_WHAT = "a model record"
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")
_MOST_TOKENS = 1 << 32


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

        fields = json_object(data, _WHAT, MAX_ENTRY_BYTES)
        if json_field(fields, "version", int, _WHAT) != VERSION:
            msg = f"{_WHAT} is of version {fields['version']}, this kvwire reads {VERSION}: use a later kvwire"
            raise FormatVersionError(msg)
        window = json_field(fields, "window", int, _WHAT)
        config, profile = (json_field(fields, f"{name}_digest", str, _WHAT) for name in ("model_config", "profile"))
        meta = replace(meta_from_json(json_field(fields, "meta", dict, _WHAT)), positions="on")
        if meta.config_digest() != fields.get("config_digest") or not 0 < window < _MOST_TOKENS:
            msg = f"{_WHAT} contradicts itself: encode any document again, which writes it anew"
            raise CorruptError(msg)
        if not (_DIGEST.fullmatch(config) and _DIGEST.fullmatch(profile)):
            msg = f"{_WHAT} holds a digest that is none: encode any document again, which writes it anew"
            raise CorruptError(msg)
        return cls(meta, window, config, profile)
