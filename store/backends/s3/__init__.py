"""A store in a bucket of S3. boto3, which is slow to import, comes with ``S3Store`` when that is asked for."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.store.backends.s3.address import S3Settings
    from kvwire.store.backends.s3.store import S3Store

__all__ = [
    "S3Settings",
    "S3Store",
]

__getattr__ = lazy(
    __name__,
    {
        "kvwire.store.backends.s3.address": ("S3Settings",),
        "kvwire.store.backends.s3.store": ("S3Store",),
    },
)
