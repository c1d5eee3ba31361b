"""Commands of the server's side: serve a store, sign a URL, make a token."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvwire.cli import options as opt
from kvwire.cli.options import StoreOptions, argument, command, flag, option
from kvwire.cli.say import say
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from kvwire.transport import ObjectServer, ServerSettings, ServerTls

    Command = Callable[..., None]


_GIB = 1 << 30
_FOLDER = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)
_SPARE_FILES = 256  # of the store, the logs and Python itself


@dataclass(frozen=True)
class _ServeOptions:
    """What ``kvwire serve`` is given."""

    store: str = option(
        "file:///folder, s3://bucket/prefix, or another address of a store.", required=True, envvar="KVWIRE_STORE"
    )
    store_token: str | None = option("Bearer token for a store behind http://.", envvar="KVWIRE_STORE_TOKEN")
    cache: str | None = opt.CACHE
    cache_size: str = opt.CACHE_SIZE
    memory_size: str | None = opt.MEMORY_SIZE
    host: str = option("Address to bind; others than loopback need access.", default="127.0.0.1", envvar="KVWIRE_HOST")
    port: int = option("0: any free port.", default=8473, type=click.IntRange(0, 65535), envvar="KVWIRE_PORT")
    token: str | None = option(
        "Bearer token with full rights; 16 characters or more where other machines can ask.", envvar="KVWIRE_TOKEN"
    )
    tenants: Path | None = option(
        "JSON list of tenants' tokens, as hashes; read again when it changes and on SIGHUP.", envvar="KVWIRE_TENANTS"
    )
    signing_keys: Path | None = option(
        "JSON object of keys for signed URLs; read again likewise.", envvar="KVWIRE_SIGNING_KEYS"
    )
    metrics_token: str | None = option("Bearer token for /metrics alone.", envvar="KVWIRE_METRICS_TOKEN")
    certificate: Path | None = option(
        "PEM file for TLS, with its chain; read again on SIGHUP.", envvar="KVWIRE_CERTIFICATE"
    )
    private_key: Path | None = option("PEM file of the certificate's key.", envvar="KVWIRE_PRIVATE_KEY")
    read_only: bool = flag("Take no uploads and delete nothing.", envvar="KVWIRE_READ_ONLY")
    status: bool = flag("Show /status, a live page for people, to those who may see /metrics.", envvar="KVWIRE_STATUS")
    spool: Path | None = option("Folder for running uploads.", type=_FOLDER, envvar="KVWIRE_SPOOL")
    max_upload_bytes: int = option(
        "Largest upload.", default=16 * _GIB, type=click.IntRange(0), envvar="KVWIRE_MAX_UPLOAD_BYTES"
    )
    max_spool_bytes: int = option(
        "Limit of all running uploads together; half of it for one client.",
        default=64 * _GIB, type=click.IntRange(0), envvar="KVWIRE_MAX_SPOOL_BYTES",
    )  # fmt: skip
    max_requests: int = option(
        "Most requests answered at once.", default=512, type=click.IntRange(1), envvar="KVWIRE_MAX_REQUESTS"
    )
    max_connections: int = option(
        "Most open connections.", default=1024, type=click.IntRange(1), envvar="KVWIRE_MAX_CONNECTIONS"
    )
    rate: float = option(
        "Requests a second of one credential, or address without any; 0: no limit.",
        default=0.0, type=click.FloatRange(0), envvar="KVWIRE_RATE",
    )  # fmt: skip
    burst: int = option(
        "Requests allowed at once before --rate applies.", default=100, type=click.IntRange(0), envvar="KVWIRE_BURST"
    )
    shutdown_seconds: float = option(
        "Seconds for running answers after SIGTERM.",
        default=30.0, type=click.FloatRange(0), envvar="KVWIRE_SHUTDOWN_SECONDS",
    )  # fmt: skip
    log_level: str = option(
        default="info", type=click.Choice(["debug", "info", "warning", "error"]), envvar="KVWIRE_LOG_LEVEL"
    )
    log_format: str = option(default="json", type=click.Choice(["json", "text"]), envvar="KVWIRE_LOG_FORMAT")
    as_json: bool = opt.JSON


@command(_ServeOptions)
def serve(options: _ServeOptions) -> None:
    """Serve a store over HTTP until interrupted; other machines need --token, --tenants or --signing-keys."""
    with logs_on_stderr(options.log_level, options.log_format):
        _serve_store(options)


def _serve_store(options: _ServeOptions) -> None:
    from kvwire.transport import AccessSettings, ObjectServer

    tls = _tls(options.certificate, options.private_key)
    access = AccessSettings(options.token or None, options.tenants, options.signing_keys, options.metrics_token or None)
    _raise_open_files(2 * options.max_connections + _SPARE_FILES)
    place = StoreOptions(
        options.store,
        token=options.store_token or None,
        cache=options.cache,
        cache_size=options.cache_size,
        memory_size=options.memory_size,
    )
    with place.opened() as store:
        server = ObjectServer(store, access=access, settings=_settings(options))
        asyncio.run(_serve(server, tls, options))


async def _serve(server: ObjectServer, tls: ServerTls | None, options: _ServeOptions) -> None:
    from kvwire.transport import listen

    def reload() -> None:
        server.reload()
        if tls is not None:
            tls.reload()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    listening = listen(server, options.host, options.port, tls=tls)
    await until_stopped(listening, f"serving {options.store}", as_json=options.as_json)


async def until_stopped(listening: AbstractAsyncContextManager[str], words: str, *, as_json: bool) -> None:
    """Listen until SIGINT or SIGTERM comes, after printing at which URL."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with listening as url:
        say(json.dumps({"url": url}) if as_json else f"{words} at {url}")
        sys.stdout.flush()
        await stop.wait()


def _settings(options: _ServeOptions) -> ServerSettings:
    from kvwire.transport import ServerSettings

    return ServerSettings(
        max_requests=options.max_requests,
        max_connections=options.max_connections,
        shutdown_s=options.shutdown_seconds,
        max_upload_bytes=options.max_upload_bytes,
        max_spool_bytes=options.max_spool_bytes,
        spool_folder=options.spool,
        requests_per_s=options.rate,
        burst=options.burst,
        read_only=options.read_only,
        status=options.status,
    )


def _tls(certificate: Path | None, private_key: Path | None) -> ServerTls | None:
    from kvwire.transport import ServerTls, TlsFiles

    if certificate is None and private_key is None:
        return None
    if certificate is None or private_key is None:
        raise ArgumentError("TLS needs both --certificate and --private-key")
    return ServerTls(TlsFiles(certificate, private_key))


def _raise_open_files(wanted: int) -> None:
    """Raise this process's limit of open files towards what its connections may need, as far as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


@contextmanager
def logs_on_stderr(level: str, layout: str) -> Iterator[None]:
    """One handler for all loggers while the block runs; libraries only tell of what goes wrong."""
    from kvwire.transport import JsonLines, TextLines

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if layout == "json" else TextLines())
    loggers = {logging.getLogger(): logging.WARNING, logging.getLogger("kvwire"): logging.getLevelName(level.upper())}
    before = {logger: logger.level for logger in loggers}
    logging.getLogger().addHandler(handler)
    for logger, wanted in loggers.items():
        logger.setLevel(wanted)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        for logger, old in before.items():
            logger.setLevel(old)


@dataclass(frozen=True)
class _SignOptions:
    """What ``kvwire sign`` is given."""

    key: str = argument()
    base_url: str = option(
        "Address of the server: https://host:port or https://host/prefix.", required=True, envvar="KVWIRE_BASE_URL"
    )
    signing_keys: Path = option("The server's file of keys.", required=True, envvar="KVWIRE_SIGNING_KEYS")
    key_id: str = option("Id of the key to sign with.", required=True, envvar="KVWIRE_KEY_ID")
    seconds: int = option("Seconds for which the URL is valid.", default=3600, type=click.IntRange(1))
    method: str = option(default="GET", type=click.Choice(["GET", "PUT", "DELETE"]))
    as_json: bool = opt.JSON


@command(_SignOptions)
def sign(options: _SignOptions) -> None:
    """Print a URL with which anyone may read (or write) the object KEY for a while."""
    from kvwire.transport import SigningKeys, sign_url

    keys = SigningKeys.read(options.signing_keys)
    expires_at = int(time.time()) + options.seconds
    url = sign_url(
        options.base_url,
        options.key,
        secret=keys.secret(options.key_id),
        key_id=options.key_id,
        expires_at=expires_at,
        method=options.method,
    )
    say(json.dumps({"url": url, "expires": expires_at}) if options.as_json else url)


@dataclass(frozen=True)
class _TokenOptions:
    """What ``kvwire token`` is given."""

    tenant: str = option(
        "Whose token; goes into the line for the tenants file.", default="default", envvar="KVWIRE_TENANT"
    )
    salt: str = option(
        "The deployment's secret, where keys are salted: the line then holds the namespace.",
        default="", envvar="KVWIRE_SALT",
    )  # fmt: skip
    write: bool = flag("The token may write.")
    as_json: bool = opt.JSON


@command(_TokenOptions)
def token(options: _TokenOptions) -> None:
    """Make a random bearer token; print it, and the line for the server's tenants file, which holds its hash alone."""
    from kvwire.store import tenant_hash
    from kvwire.transport import new_token

    namespace = tenant_hash(options.tenant, options.salt.encode())  # refuses names that no tenant can have
    whose = {"namespace": namespace} if options.salt else {"tenant": options.tenant}
    made, digest = new_token()
    entry = {**whose, "token_sha256": digest, "write": options.write}
    if options.as_json:
        say(json.dumps({"token": made, "entry": entry}))
    else:
        say(made, json.dumps(entry))


@click.command("key")
def key() -> None:
    """Make a master key for --keys; put it at the top of the file, which only you may read."""
    from kvwire.store import Keyring

    say(Keyring.new_line())
