"""TLS of a server: a certificate that can be replaced while it runs."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: the certificate with its chain, and its private key without a password."""

    certificate: Path
    private_key: Path


class ServerTls:
    """The context that connections are made with."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files. Raises ArgumentError where they cannot be used."""
        self._files = files
        self.context = self._load()

    def reload(self) -> None:
        """Load the files again, for connections from now on; where they cannot be used the old ones stay."""
        try:
            self._load()  # on a context of its own: a failure in the middle must not touch the one in use
        except ArgumentError as error:
            _log.error("%s; the certificate loaded before stays in use", error)
            return
        self._fill(self.context)
        _log.info("the certificate was read again")

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._fill(context)
        return context

    def _fill(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._files.certificate, self._files.private_key, password=lambda: "")
        except (OSError, ValueError) as error:
            msg = f"the certificate {self._files.certificate} or its private key cannot be used: check both PEM files"
            raise ArgumentError(msg) from error
