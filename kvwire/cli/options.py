"""Options that commands share: the engine, which store, whose documents in it, and what stands before it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvwire.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.runtime.links import RepairMode
    from kvwire.store import Catalog, Keyring, Store, UseFile

    Command = Callable[..., None]

MODEL = click.option(
    "--model",
    required=True,
    envvar="KVWIRE_MODEL",
    help="Folder of a Hugging Face causal model, its id on the Hub, or a GGUF file.",
)
DEVICE = click.option(
    "--device", default="cpu", envvar="KVWIRE_DEVICE", show_default=True, help="Where the model runs."
)
DTYPE = click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="auto: float32 on the CPU, elsewhere as the weights are stored.",
)
BACKEND = click.option(
    "--backend",
    default="auto",
    show_default=True,
    envvar="KVWIRE_BACKEND",
    type=click.Choice(["auto", "triton", "numba"]),
    help="Kernels that code caches; auto: Triton's on a GPU.",
)


CALIBRATION = click.option(
    "--calibration",
    type=click.Choice(["full", "quick"]),
    default="full",
    show_default=True,
    help="Tokens that a profile is fitted on: 16,384 or 2,048 at most, and no more than half of the text.",
)
PREFIX_LAYERS = click.option(
    "--prefix-layers",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Layers that readers compute anew, which makes blobs smaller.",
)
RESUME = click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep in this file how far the fit of a profile has got; one that was interrupted goes on from it.",
)


def _schemes(_context: click.Context, _option: click.Parameter, told: tuple[str, ...]) -> tuple[str, ...]:
    """Names between commas, each of which is a way of hashing prompts."""
    from kvwire.store import hash_scheme

    names = tuple(name.strip() for each in told for name in each.split(","))
    for name in names:
        hash_scheme(name, "")
    return names


INDEX = click.option(
    "--index",
    multiple=True,
    callback=_schemes,
    metavar="NAME[,NAME...]",
    help="Let prompts find the documents that they begin with: kvwire, lmcache:256, sglang:64 (tokens of a chunk).",
)
USES = click.option("--uses", envvar="KVWIRE_USES", metavar="FILE", help="Where uses of documents are counted.")
REPAIR = click.option(
    "--repair",
    default="auto",
    show_default=True,
    metavar="none|auto|all|SHARE",
    help="Rows of the prompt that are computed anew so that documents see each other: none, as many as the deadline "
    "leaves time for, all, or a share from 0 to 1.",
)


def _max_kl(_context: click.Context, _option: click.Parameter, told: str) -> float | None:
    """A KL divergence; None for none."""
    from kvwire.runtime.settings import check_max_kl

    if told.strip().lower() == "none":
        return None
    try:
        value = float(told)
    except ValueError as error:
        msg = f"--max-kl is a KL divergence in nats, 0 or more, or none; got {told!r}"
        raise ArgumentError(msg) from error
    check_max_kl(value)
    return value


MAX_KL = click.option(
    "--max-kl",
    default="0.03",
    show_default=True,
    envvar="KVWIRE_MAX_KL",
    callback=_max_kl,
    metavar="NATS|none",
    help="Of each document, fetch no coarser level than the first of which no greater KL divergence is expected; none: "
    "any level. Does not hold where --floor is given.",
)
FLOOR = click.option(
    "--floor",
    type=click.IntRange(0, 7),
    help="Lowest level to use where there is a choice, in place of --max-kl.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


@dataclass(frozen=True)
class StoreOptions:
    """A store and a tenant, as options name them.

    Attributes:
        store: Address of the store; None where a command can do without.
        token: Bearer token for HTTP stores.
        tenant: Whose documents.
        salt: The deployment's secret.
        keys: File of master keys, where this tenant's objects are sealed.
        cache: Folder of the tier before the store.
        cache_size: Of that folder, such as 10GB.
        memory_size: Of the tier in memory, such as 2GB; None: there is none.
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
        """Open the store, behind its tiers where some were asked for."""
        from kvwire.store.schemes import open_store

        if self.store is None:
            msg = "no store is named: give --store, or set KVWIRE_STORE"
            raise ArgumentError(msg)
        return open_store(
            self.store, token=self.token, cache=self.cache, cache_size=self.cache_size, memory_size=self.memory_size
        )

    def open_lasting(self, *, exists: bool = False) -> Store:
        """Open a store that outlives this process."""
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

    def catalog(self, store: Store) -> Catalog:
        """The tenant's catalog in a store."""
        from kvwire.store import Catalog

        return Catalog(store, **self.whose())

    def keyring(self) -> Keyring | None:
        """The master keys, where a file of them is named."""
        from kvwire.store import Keyring

        return Keyring.read(self.keys) if self.keys else None


LINKS = click.option(
    "--links",
    metavar="LAYOUT",
    help="What stands around documents and in their caches: plain, kvlink:5, kvlink:5:evaluation, wrappers:8+8, "
    "anchors:100/25, links:5, turborag:IDS/IDS, block-attention:IDS; by default what the soft tokens were trained for.",
)
SOFT_TOKENS = click.option(
    "--soft-tokens",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Trained embeddings that are no entries of the vocabulary, as kvwire train-links writes them.",
)

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


def use_file(path: str | None) -> UseFile | None:
    """Where uses of documents are counted; None where ``--uses`` names no file."""
    from kvwire.store import UseFile

    return UseFile(path) if path else None


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def repair_of(text: str) -> RepairMode | float:
    """``--repair`` as settings take it."""
    modes: dict[str, RepairMode] = {"none": "none", "auto": "auto", "all": "all"}
    if text in modes:
        return modes[text]
    try:
        return float(text)
    except ValueError as error:
        msg = f"--repair is none, auto, all or a share of rows from 0 to 1, got {text!r}"
        raise ArgumentError(msg) from error
