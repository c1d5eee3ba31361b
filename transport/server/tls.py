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
    """PEM files.

    Attributes:
        certificate: With its chain.
        private_key: Without a password.
    """

    certificate: Path
    private_key: Path


class ServerTls:
    """The context that connections are made with; each handshake takes the certificate that was read last."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files.

        Args:
            files: Certificate and key.

        Raises:
            ArgumentError: They cannot be used.
        """
        self._files = files
        self.context = self._current = self._load()
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Load the files again, for connections from now on; where they cannot be used the old ones stay."""
        try:
            self._current = self._load()
        except ArgumentError as error:
            _log.error("%s; the certificate loaded before stays in use", error)
        else:
            _log.info("the certificate was read again")

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in each handshake, also where the client names no host."""
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._files.certificate, self._files.private_key, password=lambda: "")
        except (OSError, ValueError) as error:
            msg = f"the certificate {self._files.certificate} or its private key cannot be used: check both PEM files"
            raise ArgumentError(msg) from error
        return context
