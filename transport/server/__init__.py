"""``kvwire serve``: the objects of any store over HTTP."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from .access import AccessSettings, is_loopback
    from .application import ObjectServer
    from .credentials import SigningKeys, TenantTokens, new_token, sign_url
    from .exchange import JsonLines, TextLines
    from .listening import ServerTls, TlsFiles, listen, serve
    from .settings import ServerSettings

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
        "kvwire.transport.server.credentials": ("SigningKeys", "TenantTokens", "new_token", "sign_url"),
        "kvwire.transport.server.exchange": ("JsonLines", "TextLines"),
        "kvwire.transport.server.listening": ("ServerTls", "TlsFiles", "listen", "serve"),
        "kvwire.transport.server.settings": ("ServerSettings",),
    },
)
