"""``kvwire serve``: the objects of any store over HTTP."""

from .access import AccessSettings, is_loopback
from .application import ObjectServer
from .credentials import TenantTokens, new_token
from .log_lines import JsonLines, TextLines
from .running import listen, serve
from .settings import ServerSettings
from .signing import SigningKeys, sign_url
from .tls import ServerTls, TlsFiles

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
