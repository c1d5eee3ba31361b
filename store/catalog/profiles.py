"""Profiles, and which of them a model configuration uses for new blobs."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, CorruptError, NotFoundError
from kvwire.store.catalog.tenant_objects import MAX_SMALL_BYTES, TenantObjects
from kvwire.store.catalog_entry import MAX_ENTRY_BYTES, parse_object
from kvwire.store.keys import check_digest

if TYPE_CHECKING:
    from kvwire.store.catalog.tenant_objects import Config
    from kvwire.store.model_record import ModelRecord


class Profiles(TenantObjects):
    """A tenant's profiles and model records."""

    def put_profile(self, config: Config, data: bytes) -> str:
        """Write a profile; ``set_current_profile`` puts it to use.

        Args:
            config: The model configuration.
            data: The profile's bytes. They are written even where they are, which heals a rotten copy.

        Returns:
            The profile's digest.
        """
        digest = hashlib.sha256(data).hexdigest()
        self._put_entry(self.keys(config).profile(digest), data)  # even where it is: a rotten copy is healed
        return digest

    def get_profile(self, config: Config, digest: str) -> bytes:
        """Read a profile and check it against its digest.

        Args:
            config: The model configuration.
            digest: SHA-256 of the profile.

        Returns:
            The profile's bytes.

        Raises:
            NotFoundError: There is no such profile.
            CorruptError: The bytes are not those of the digest.
        """
        try:
            data = self._intact(self.keys(config).profile(digest), MAX_SMALL_BYTES)
        except NotFoundError as error:
            msg = f"profile {digest[:12]} is not in {self._store.url}: fit it again or copy it from where it is"
            raise NotFoundError(msg) from error
        if data is None:
            advice = "kvwire store verify --delete-damaged deletes it; then fit or copy it again"
            msg = f"profile {digest[:12]} is damaged in {self._store.url}: {advice}"
            raise CorruptError(msg)
        return data

    def set_current_profile(self, config: Config, digest: str) -> None:
        """Use this profile for new blobs of the configuration.

        Args:
            config: The model configuration.
            digest: SHA-256 of the profile.

        Raises:
            NotFoundError: The profile has not been written.
        """
        space = self.keys(config)
        self._store.stat(space.profile(digest))
        self._put_entry(space.current_profile, json.dumps({"profile_digest": digest}).encode())

    def current_profile(self, config: Config) -> str | None:
        """The profile in use.

        Args:
            config: The model configuration.

        Returns:
            Its digest; None where none has been chosen.

        Raises:
            CorruptError: The pointer to the profile is damaged.
        """
        data = self._read(self.keys(config).current_profile, MAX_ENTRY_BYTES + 1)
        if data is None:
            return None
        try:
            return check_digest(str(parse_object(data).get("profile_digest")), "the current profile's digest")
        except ArgumentError as error:
            msg = f"the catalog's pointer to the profile is damaged ({error}): set the current profile again"
            raise CorruptError(msg) from error

    def put_link_report(self, config: Config, data: bytes) -> None:
        """Keep what was measured of linked documents; it replaces what was there.

        Args:
            config: The model configuration.
            data: JSON, an object.
        """
        self._put_entry(self.keys(config).link_report, data)

    def link_report(self, config: Config) -> bytes | None:
        """What was measured of linked documents.

        Args:
            config: The model configuration.

        Returns:
            JSON; None where nobody measured.
        """
        return self._read(self.keys(config).link_report, MAX_ENTRY_BYTES + 1)

    def put_model(self, record: ModelRecord) -> bool:
        """Write a record under its configuration, where another one or none is there.

        Args:
            record: The record.

        Returns:
            Whether it was written.
        """
        space, data = self.keys(record.meta.config_digest()), record.to_json()
        try:
            if self._read(space.model_record, MAX_ENTRY_BYTES + 1) == data:
                return False
        except CorruptError:
            pass  # a damaged one gives way
        self._put_entry(space.model_record, data)
        return True

    def model(self, config: Config) -> ModelRecord | None:
        """Read a configuration's record.

        Args:
            config: The model configuration.

        Returns:
            The record; None where nothing was encoded since there are such.

        Raises:
            CorruptError: The record is damaged, or of another configuration.
            AuthError: It is sealed, and this catalog has no key for it.
        """
        from kvwire.store.model_record import ModelRecord

        space = self.keys(config)
        data = self._read(space.model_record, MAX_ENTRY_BYTES + 1)
        if data is None:
            return None
        record = ModelRecord.from_json(data)
        if self.keys(record.meta.config_digest()) != space:
            msg = f"{space.model_record} is of another configuration: encode any document again, which writes it anew"
            raise CorruptError(msg)
        return record
