"""A store in a bucket of S3. boto3, which is slow to import, comes with ``S3Store`` when that is asked for."""

from typing import TYPE_CHECKING

from kvwire.store.s3.settings import S3Settings

if TYPE_CHECKING:
    from kvwire.store.s3.store import S3Store

__all__ = ["S3Settings", "S3Store"]


def __getattr__(name: str) -> object:
    """Import the store, and boto3 with it, when it is asked for."""
    if name != "S3Store":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from kvwire.store.s3.store import S3Store

    return S3Store
