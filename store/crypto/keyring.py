"""Master keys for encryption at rest, and the keys of tenants that come from them."""

from __future__ import annotations

import base64
import binascii
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, AuthError
from kvwire.store.files.files import reading

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from kvwire.store.crypto.sealing import TenantKeys

MASTER_BYTES = 32
_MAX_FILE_BYTES = 1 << 16


class Keyring:
    """Master keys, the newest first: it seals, all of them open. Nothing here ever prints a key."""

    def __init__(self, masters: Sequence[bytes]) -> None:
        """Keep them."""
        if not masters or any(len(master) != MASTER_BYTES for master in masters):
            raise ArgumentError(f"a keyring needs master keys of {MASTER_BYTES} bytes each; make one with kvwire key")
        self._masters = tuple(bytes(master) for master in masters)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Keyring:
        """Read a keyring file.

        Args:
            path: A file with one key a line in base64, the newest first; empty lines and those after ``#`` do not
                count.

        Returns:
            The keyring.

        Raises:
            NotFoundError: There is no such file.
            AuthError: Others than its owner may read it.
            ArgumentError: A line is no key.
        """
        path = Path(path)
        with reading(f"the keyring {path}"):
            about = path.stat()
            if about.st_mode & 0o077:
                raise AuthError(f"the keyring {path} can be read by others: chmod 600 it")
            with path.open("rb") as file:
                lines = file.read(_MAX_FILE_BYTES).decode(errors="replace").splitlines()
        told = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"]
        return cls([_master(line, path, number) for number, line in told])

    @staticmethod
    def new_line() -> str:
        """A fresh master key, as a line of a keyring file."""
        return base64.b64encode(secrets.token_bytes(MASTER_BYTES)).decode()

    def tenant(self, tenant: str) -> TenantKeys:
        """The keys of one tenant.

        Args:
            tenant: The tenant's hash, as keys of objects carry it (``tenant_hash``).

        Returns:
            One key from each master key.
        """
        from kvwire.store.crypto.sealing import TenantKey, TenantKeys, derive_key

        def key(master: bytes) -> TenantKey:
            secret = derive_key(master, b"kvwire tenant key\0" + tenant.encode())
            return TenantKey(derive_key(secret, b"kvwire key id")[:16], secret)

        return TenantKeys([key(master) for master in self._masters])


def _master(line: str, path: Path, number: int) -> bytes:
    try:
        master = base64.b64decode(line.strip(), validate=True)
    except (binascii.Error, ValueError):
        master = b""
    if len(master) != MASTER_BYTES:
        raise ArgumentError(
            f"line {number} of the keyring {path} is no key of {MASTER_BYTES} bytes in base64; make one with kvwire key"
        )
    return master
