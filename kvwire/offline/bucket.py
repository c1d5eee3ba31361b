"""Objects of an S3 bucket as sources, under any names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.store import range_header
from kvwire.store.backends.s3.address import S3Address, S3Settings
from kvwire.store.backends.s3.client import S3Client
from kvwire.store.backends.s3.requests import read_answer

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bucket:
    """Objects below ``s3://bucket/prefix?endpoint=...``; boto3 finds the credentials."""

    def __init__(self, address: str) -> None:
        """Parse the address and find credentials; sends no request."""
        self._address, self._settings = S3Address.parse(address), S3Settings()
        self._client = S3Client(self._address, self._settings)

    @property
    def url(self) -> str:
        """The address, without secrets."""
        return self._address.url

    def objects(self) -> Iterator[tuple[str, int]]:
        """List the objects."""
        address, token = self._address, ""
        while True:
            following: dict[str, Any] = {"ContinuationToken": token} if token else {}
            with self._client.asking() as boto:
                page = boto.list_objects_v2(Bucket=address.bucket, Prefix=address.root, **following)
            for listed in page.get("Contents", ()):
                yield listed["Key"].removeprefix(address.root), listed["Size"]
            token = page.get("NextContinuationToken", "")
            if not (page.get("IsTruncated") and token):
                return

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Read an object, or a part of it."""
        range_argument: dict[str, Any] = (
            {"Range": range_header(start, end)} if start else {}
        )  # an empty object has no range
        with self._client.asking(name) as boto:
            answer = boto.get_object(Bucket=self._address.bucket, Key=self._address.root + name, **range_argument)
            return read_answer(answer, start, end, total_s=self._settings.total_s, what=name)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
