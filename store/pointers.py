"""Small records of the catalog: which profile is in use, which shift links take, what is about to be deleted."""

from __future__ import annotations

from msgspec import Struct

from kvwire._json import Sha256, Sha256OrEmpty, record, strict_json
from kvwire.store.catalog_entry import Outline, parse_object


class ProfilePointer(Struct):
    """The profile in use, and the outline of one in sections, as ``CatalogEntry`` has it."""

    profile_digest: Sha256
    profile_outline: Outline | None = None

    @classmethod
    def from_json(cls, data: bytes) -> ProfilePointer:
        """Parse it; CorruptError where it is none."""
        return record(parse_object(data), cls, "the catalog's pointer to the profile", "set the current profile again")


class LinkReportShift(Struct):
    """The shift that a report on links measured; empty where none was learnt."""

    shift: Sha256OrEmpty | None = ""

    @classmethod
    def from_json(cls, data: bytes) -> LinkReportShift:
        """Parse it; CorruptError where it is none."""
        return record(strict_json(data), cls, "the report on links", "run kvwire check-model again")


class Announcement(Struct):
    """Names of the objects that a collector is about to delete."""

    collecting: list[str]

    @classmethod
    def from_json(cls, data: bytes) -> Announcement:
        """Parse it; CorruptError where it is none."""
        return record(parse_object(data), cls, "an announcement", "it names no objects: collect again")
