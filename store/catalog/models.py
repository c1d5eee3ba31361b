"""What is known of models: their records, and what was measured of linked documents."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, NotFoundError
from kvwire.store.catalog.objects import MAX_SMALL_BYTES

if TYPE_CHECKING:
    from kvwire.store.catalog.objects import Config, TenantObjects
    from kvwire.store.model_record import ModelRecord


class Models:
    """A tenant's model records and measurements; ``Catalog.models`` is one."""

    def __init__(self, objects: TenantObjects) -> None:
        """Read and write through the catalog's objects."""
        self._objects = objects

    def put_link_report(self, config: Config, data: bytes) -> None:
        """Keep what was measured of linked documents; it replaces what was there."""
        self._objects.write(self._objects.keys(config).link_report, data)

    def link_report(self, config: Config) -> bytes | None:
        """What was measured of linked documents."""
        return self._objects.read(self._objects.keys(config).link_report)

    def put_link_shift(self, config: Config, data: bytes) -> str:
        """Write a link shift; it is kept while the report on links names it."""
        digest = hashlib.sha256(data).hexdigest()
        self._objects.write(self._objects.keys(config).shift(digest), data)
        return digest

    def link_shift(self, config: Config, digest: str) -> bytes:
        """Read a link shift and check it against its digest."""
        advice = "run kvwire check-model again"
        try:
            data = self._objects.intact(self._objects.keys(config).shift(digest), MAX_SMALL_BYTES)
        except NotFoundError as error:
            msg = f"the link shift {digest[:12]} is not in {self._objects.store.url}: {advice}"
            raise NotFoundError(msg) from error
        if data is None:
            msg = f"the link shift {digest[:12]} is damaged in {self._objects.store.url}: {advice}"
            raise CorruptError(msg)
        return data

    def put(self, record: ModelRecord) -> bool:
        """Write a record under its configuration, where another one or none is there."""
        space, data = self._objects.keys(record.meta.config_digest()), record.to_json()
        try:
            if self._objects.read(space.model_record) == data:
                return False
        except CorruptError:
            pass  # a damaged one gives way
        self._objects.write(space.model_record, data)
        return True

    def get(self, config: Config) -> ModelRecord | None:
        """Read a configuration's record."""
        from kvwire.store.model_record import ModelRecord

        space = self._objects.keys(config)
        data = self._objects.read(space.model_record)
        if data is None:
            return None
        record = ModelRecord.from_json(data)
        if self._objects.keys(record.meta.config_digest()) != space:
            msg = f"{space.model_record} is of another configuration: encode any document again, which writes it anew"
            raise CorruptError(msg)
        return record
