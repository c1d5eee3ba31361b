"""Options that commands share: which store, whose documents in it, and what stands before it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from kvwire.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.store import Keyring, Store

    Command = Callable[..., None]


@dataclass(frozen=True)
class StoreOptions:
    """A store and a tenant, as options name them.

    store: its address, None where a command can do without. keys: file of master keys, where this tenant's objects are
    sealed. cache, cache_size, memory_size: folder and sizes of the tiers before the store.
    """

    store: str | None
    token: str | None = field(default=None, repr=False)
    tenant: str = "default"
    salt: str = field(default="", repr=False)
    keys: str | None = None
    cache: str | None = None
    cache_size: str = "10GB"
    memory_size: str | None = None

    def open(self) -> Store:
        """The store, behind its tiers where some were asked for."""
        from kvwire.store.schemes import open_store

        if self.store is None:
            msg = "no store is named: give --store, or set KVWIRE_STORE"
            raise ArgumentError(msg)
        return open_store(
            self.store, token=self.token, cache=self.cache, cache_size=self.cache_size, memory_size=self.memory_size
        )

    def open_lasting(self, *, exists: bool = False) -> Store:
        """A store that outlives this process; ``exists``: and whose folder is there already."""
        from kvwire.store import FolderStore, MemoryStore

        opened = self.open()
        if isinstance(opened, MemoryStore):
            msg = "a memory store ends with this command; name a folder: --store file:///path"
            raise ArgumentError(msg)
        if exists and isinstance(opened, FolderStore) and not opened.root.is_dir():
            msg = f"{opened.root} is not a folder; check --store, or encode documents into it first"
            raise NotFoundError(msg)
        return opened

    def whose(self) -> dict[str, Any]:
        """``tenant``, ``salt`` and ``keyring``, as ``Corpus`` and ``Catalog`` take them."""
        return {"tenant": self.tenant, "salt": self.salt.encode(), "keyring": self.keyring()}

    def keyring(self) -> Keyring | None:
        """The master keys, where a file of them is named."""
        from kvwire.store import Keyring

        return Keyring.read(self.keys) if self.keys else None


_TIERS = (
    click.option("--cache", envvar="KVWIRE_CACHE", help="Folder of a local cache before the store."),
    click.option(
        "--cache-size", default="10GB", envvar="KVWIRE_CACHE_SIZE", show_default=True, help="Of the cache folder."
    ),
    click.option("--memory-size", envvar="KVWIRE_MEMORY_SIZE", help="Of a cache in memory, such as 2GB."),
)
_OPTIONS = (
    click.option(
        "--store",
        envvar="KVWIRE_STORE",
        help="file:///folder, http://host:port, or s3://bucket/prefix?endpoint=http://host:port.",
    ),
    click.option("--token", envvar="KVWIRE_TOKEN", help="Bearer token for http stores."),
    click.option("--tenant", default="default", envvar="KVWIRE_TENANT", show_default=True, help="Whose documents."),
    click.option(
        "--salt", default="", envvar="KVWIRE_SALT", help="The deployment's secret: hides whose part is whose."
    ),
    click.option("--keys", envvar="KVWIRE_KEYS", help="File of master keys: objects are encrypted (kvwire key)."),
    *_TIERS,
)
_NAMES = ("store", "token", "tenant", "salt", "keys", "cache", "cache_size", "memory_size")


def store_options(command: Command) -> Command:
    """Give a command the options of a store; it gets them as one ``StoreOptions``, called ``place``."""

    @functools.wraps(command)
    def collected(**given: Any) -> None:  # noqa: ANN401 - click's values
        place = StoreOptions(**{name: given.pop(name) for name in _NAMES})
        command(place=place, **given)

    return _with(_OPTIONS, collected)


def tier_options(command: Command) -> Command:
    """Give a command the options of the tiers before a store: ``cache``, ``cache_size`` and ``memory_size``."""
    return _with(_TIERS, command)


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


@click.command("key")
def key() -> None:
    """Make a master key for --keys; put it at the top of the file, which only you may read."""
    from kvwire.store import Keyring

    click.echo(Keyring.new_line())
