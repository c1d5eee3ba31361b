"""Encodes corpora of any size, on one machine or with Ray on many; a manifest has one row per document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.offline.check import ProfileCheck, check_profile
    from kvwire.offline.manifest import LevelRow, Row, read_manifest, writing
    from kvwire.offline.on_ray import RaySettings, encode_on_ray
    from kvwire.offline.on_vllm import VllmSettings, encode_on_vllm
    from kvwire.offline.pipeline import encode_serially, encode_side_by_side, prepare_profile
    from kvwire.offline.profiles import ProfileLevel, ProfileSummary, fit_profile_file, summarise
    from kvwire.offline.refs import DocumentRef
    from kvwire.offline.sources import find_documents
    from kvwire.offline.steps import RunOptions, Work

__all__ = [
    "DocumentRef",
    "LevelRow",
    "ProfileCheck",
    "ProfileLevel",
    "ProfileSummary",
    "RaySettings",
    "Row",
    "RunOptions",
    "VllmSettings",
    "Work",
    "check_profile",
    "encode_on_ray",
    "encode_on_vllm",
    "encode_serially",
    "encode_side_by_side",
    "find_documents",
    "fit_profile_file",
    "prepare_profile",
    "read_manifest",
    "summarise",
    "writing",
]

__getattr__ = lazy(__name__)
