"""TLS of everything that asks a server: the system's certificates, and no version that is broken."""

from __future__ import annotations

import ssl


def client_tls(*, cafile: str | None = None, capath: str | None = None) -> ssl.SSLContext:
    """Make a context for connections to servers. Not every Python refuses old versions by itself.

    Args:
        cafile: Certificates to trust; None: the system's.
        capath: Folder of certificates to trust.

    Returns:
        The context, from TLS 1.2 on.

    Raises:
        OSError: The certificates cannot be read.
    """
    context = ssl.create_default_context(cafile=cafile, capath=capath)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
