"""Profiles and model records, and what was measured of linked documents."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvwire import codec
from kvwire.errors import CorruptError, NotFoundError
from kvwire.store.catalog.objects import MAX_SMALL_BYTES
from kvwire.store.records import ProfilePointer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.codec import AnyProfile
    from kvwire.codec.format.arrays import Section
    from kvwire.store.catalog.objects import Config, TenantObjects
    from kvwire.store.records import ModelRecord


_ABSENT = "fit it again or copy it from where it is"
_DAMAGED = "kvwire store verify --delete-damaged deletes it; then fit or copy it again"


class Profiles:
    """A tenant's profiles; ``Catalog.profiles`` is one."""

    def __init__(self, objects: TenantObjects) -> None:
        """Read and write through the catalog's objects."""
        self._objects = objects

    def put(self, config: Config, data: bytes) -> str:
        """Write a profile; ``set_current`` puts it to use."""
        digest = hashlib.sha256(data).hexdigest()
        self._objects.write(
            self._objects.keys(config).profile(digest), data
        )  # even where it is: a rotten copy is healed
        return digest

    def get(self, config: Config, digest: str) -> bytes:
        """Read a profile and check it against its digest."""
        key = self._objects.keys(config).profile(digest)
        return self._objects.content(key, f"profile {digest[:12]}", _ABSENT, _DAMAGED)

    def get_parts(self, config: Config, digest: str, parts: Sequence[tuple[int, int, str]]) -> list[bytes]:
        """Read parts of a profile that follow each other, in one request, and compare each with its digest."""
        key, start, end = self._objects.keys(config).profile(digest), parts[0][0], parts[-1][1]
        bad: list[int] = []
        for _ in range(2):
            try:
                data = self._objects.store.get(key, start, min(end, start + MAX_SMALL_BYTES))
            except NotFoundError as error:
                raise NotFoundError(f"profile {digest[:12]} is not in {self._objects.store.url}: {_ABSENT}") from error
            found = [data[first - start : last - start] for first, last, _ in parts]
            known = [hashlib.sha256(part).hexdigest() for part in found]
            bad = [each[0] for each, sha256 in zip(parts, known, strict=True) if sha256 != each[2]]
            if not bad:
                return found
            self._objects.store.distrust(key, start, end)
        where = f"{self._objects.store.url} from byte {bad[0]} on"
        raise CorruptError(f"profile {digest[:12]} is damaged or cut short in {where}: {_DAMAGED}")

    def open(
        self, config: Config, digest: str, outline: tuple[int, str] | None, level: int, later: Profiles
    ) -> AnyProfile:
        """Read a profile: whole, or, where its outline is known, what the first levels need."""
        if outline is None:
            return codec.read_profile(self.get(config, digest))
        (told,) = self.get_parts(config, digest, [(0, *outline)])
        turn = iter((self,))

        def fetch(sections: Sequence[Section]) -> list[bytes]:
            parts = [(section.start, section.end, section.sha256) for section in sections]
            return next(turn, later).get_parts(config, digest, parts)

        return codec.open_profile(told, digest, fetch, level)

    def set_current(self, config: Config, digest: str, outline: tuple[int, str] | None = None) -> None:
        """Use this profile for new blobs of the configuration."""
        space, fields = self._objects.keys(config), {"profile_digest": digest}
        self._objects.store.stat(space.profile(digest))
        told = fields if outline is None else fields | {"profile_outline": list(outline)}
        self._objects.write(space.current_profile, json.dumps(told).encode())

    def current(self, config: Config) -> str | None:
        """The profile in use."""
        found = self.in_use(config)
        return None if found is None else found[0]

    def in_use(self, config: Config) -> tuple[str, tuple[int, str] | None] | None:
        """The profile in use, and how to read its first sections alone."""
        data = self._objects.read(self._objects.keys(config).current_profile)
        if data is None:
            return None
        pointer = ProfilePointer.from_json(data)
        return pointer.profile_digest, pointer.profile_outline


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
        key, advice = self._objects.keys(config).shift(digest), "run kvwire check-model again"
        return self._objects.content(key, f"the link shift {digest[:12]}", advice, advice)

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
        from kvwire.store.records import ModelRecord

        space = self._objects.keys(config)
        data = self._objects.read(space.model_record)
        if data is None:
            return None
        record = ModelRecord.from_json(data)
        if self._objects.keys(record.meta.config_digest()) != space:
            msg = f"{space.model_record} is of another configuration: encode any document again, which writes it anew"
            raise CorruptError(msg)
        return record
