"""``kvwire serve``: the objects of any store over HTTP."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.transport.server.access import AccessSettings, is_loopback
    from kvwire.transport.server.application import ObjectServer
    from kvwire.transport.server.credentials import TenantTokens, new_token
    from kvwire.transport.server.log_lines import JsonLines, TextLines
    from kvwire.transport.server.running import listen, serve
    from kvwire.transport.server.settings import ServerSettings
    from kvwire.transport.server.signing import SigningKeys, sign_url
    from kvwire.transport.server.tls import ServerTls, TlsFiles

__all__ = [
    "AccessSettings",
    "JsonLines",
    "ObjectServer",
    "ServerSettings",
    "ServerTls",
    "SigningKeys",
    "TenantTokens",
    "TextLines",
    "TlsFiles",
    "is_loopback",
    "listen",
    "new_token",
    "serve",
    "sign_url",
]

__getattr__ = lazy(
    __name__,
    {
        "kvwire.transport.server.access": ("AccessSettings", "is_loopback"),
        "kvwire.transport.server.application": ("ObjectServer",),
        "kvwire.transport.server.credentials": ("TenantTokens", "new_token"),
        "kvwire.transport.server.log_lines": ("JsonLines", "TextLines"),
        "kvwire.transport.server.running": ("listen", "serve"),
        "kvwire.transport.server.settings": ("ServerSettings",),
        "kvwire.transport.server.signing": ("SigningKeys", "sign_url"),
        "kvwire.transport.server.tls": ("ServerTls", "TlsFiles"),
    },
)
