"""Options that commands share: the engine, which store, whose documents in it, and what stands before it."""

from __future__ import annotations

import functools
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from kvwire.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import DataclassInstance

    from kvwire.runtime.settings import RepairMode
    from kvwire.store import Catalog, Keyring, Store, TieredStore, UseFile

    Command = Callable[..., None]

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, eq=False)
class Parameter:
    """An option or argument of commands: the default of a field of a command's options, or a decorator."""

    make: Callable[..., Callable[[Command], Command]]
    names: tuple[str, ...]
    settings: dict[str, Any]

    def of(self, kind: str) -> Parameter:
        """The same with what the type of its field says: several values, or a path."""
        said: dict[str, Any] = {"multiple": True} if self.make is click.option and kind.startswith("tuple") else {}
        if "Path" in kind:
            said["type"] = click.Path(path_type=Path)
        return replace(self, settings=said | self.settings)

    def __call__(self, command: Command, field: str = "") -> Command:
        """Give a command the parameter, under the name of the field that takes it, or the one that it spells."""
        is_option, dashed = self.make is click.option, "--" + field.replace("_", "-")
        names = self.names or ((dashed,) if is_option else ())
        is_named = not field or any(not each.startswith("-") for each in names)
        return self.make(*names, *(() if is_named else (field,)), **self.settings)(command)


def option(text: str = "", *names: str, **settings: Any) -> Any:  # noqa: ANN401 - click's; the default of any field
    """An option, by default spelt as its field: its help, and what ``click.option`` takes. Its default is shown."""
    shown = {"show_default": settings.get("default") not in (None, "")} | ({"help": text} if text else {})
    return Parameter(click.option, names, shown | settings)


def flag(text: str, *names: str, **settings: Any) -> Any:  # noqa: ANN401 - likewise
    """An option without a value."""
    return option(text, *names, is_flag=True, **settings)


def argument(**settings: Any) -> Any:  # noqa: ANN401 - likewise
    """An argument, called as its field, as ``click.argument`` takes it."""
    return Parameter(click.argument, (), settings)


ABOVE_0 = click.FloatRange(min=0, min_open=True)
FILE = click.Path(dir_okay=False, path_type=Path)
MODEL = option(
    "Folder of a Hugging Face causal model, its id on the Hub, or a GGUF file.", required=True, envvar="KVWIRE_MODEL"
)
DEVICE = option("Device of the model, such as cpu or cuda:0.", default="cpu", envvar="KVWIRE_DEVICE")
DTYPE = option(
    "auto: float32 on the CPU, elsewhere as the weights are stored.", default="auto",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
)  # fmt: skip
BACKEND = option(
    "Kernels that encode and decode; auto: Triton on a GPU.", default="auto", envvar="KVWIRE_BACKEND",
    type=click.Choice(["auto", "triton", "numba"]),
)  # fmt: skip
CALIBRATION = option(
    "Tokens to fit a profile on: at most 16,384 (full) or 2,048 (quick), and half of the text.",
    type=click.Choice(["full", "quick"]), default="full",
)  # fmt: skip
PREFIX_LAYERS = option("Layers that readers recompute, which makes blobs smaller.", default=0, type=click.IntRange(0))
RESUME = option("File for the progress of a profile's fit; an interrupted fit resumes from it.", type=FILE)
OBJECTIVE = option(
    "The soonest first token, or the best quality or the fewest bytes within the deadline; by default quality with a "
    "deadline, and earliest without.",
    type=click.Choice(["earliest", "quality", "cheapest"]),
)
CONFIG = option("Model configuration, as kvwire store ls --configs lists them.", default="", metavar="PREFIX")
LEVEL = option("Quality level of all chunks.", type=click.IntRange(0))
CHAT_BEFORE = option("With --chat, the user's words before the documents.", default="")
LOG_LEVEL = option(default="info", type=click.Choice(["debug", "info", "warning", "error"]))
LOG_FORMAT = option(default="json", type=click.Choice(["json", "text"]))


def _schemes(_context: click.Context, _option: click.Parameter, told: tuple[str, ...]) -> tuple[str, ...]:
    """Names between commas, each of which is a way of hashing prompts."""
    from kvwire.store import DONORS, hash_scheme

    names = tuple(name.strip() for each in told for name in each.split(","))
    for name in names:
        if name == DONORS:
            continue
        try:
            hash_scheme(name, "")
        except ArgumentError as error:
            msg = f"{error}; {DONORS} is an index, too"
            raise ArgumentError(msg) from None
    return names


INDEX = option(
    "Let prompts find the documents that they begin with: kvwire, lmcache:256, sglang:64 (tokens of a chunk); or those "
    "that they are much like: donors.",
    callback=_schemes,
    metavar="NAME[,NAME...]",
)
USES = option("File in which uses of documents are counted.", envvar="KVWIRE_USES", metavar="FILE")
REPAIR = option(
    "Rows of the prompt that are computed anew so that documents see each other: none, as many as the deadline "
    "leaves time for, all, or a share from 0 to 1.",
    default="auto",
    metavar="none|auto|all|SHARE",
)


def _max_kl(_context: click.Context, _option: click.Parameter, told: str) -> float | None:
    """A KL divergence; None for none."""
    from kvwire.runtime.settings import check_max_kl

    if told.strip().lower() == "none":
        return None
    try:
        value = float(told)
    except ValueError as error:
        raise ArgumentError(f"--max-kl is a KL divergence in nats, 0 or more, or none; got {told!r}") from error
    check_max_kl(value)
    return value


MAX_KL = option(
    "Coarsest level to fetch of a document: the first whose expected KL divergence is at most this; none: any. "
    "--floor overrides it.",
    default="0.03",
    envvar="KVWIRE_MAX_KL",
    callback=_max_kl,
    metavar="NATS|none",
)
FLOOR = option("Coarsest level to use if there is a choice, in place of --max-kl.", type=click.IntRange(0, 7))
JSON = flag("Print JSON on stdout.", "--json", "as_json")


CACHE = option("Folder of a local cache before the store.", envvar="KVWIRE_CACHE", is_eager=True)


def _cache_size(context: click.Context, given: click.Parameter, size: str) -> str:
    """Refuse a size on the command line where no folder is named; the variable may be set for other commands."""
    named = context.get_parameter_source(given.name or "") is click.core.ParameterSource.COMMANDLINE
    if named and not context.params.get("cache"):
        raise ArgumentError("--cache-size is the size of the cache folder: name the folder with --cache, too")
    return size


CACHE_SIZE = option("Size of the cache folder.", default="10GB", envvar="KVWIRE_CACHE_SIZE", callback=_cache_size)
MEMORY_SIZE = option("Size of a cache in memory, such as 2GB.", envvar="KVWIRE_MEMORY_SIZE")


def _field(parameter: Parameter, *, shown: bool = True) -> Any:  # noqa: ANN401 - of any field
    """A field with an option's default, for objects that are made in Python, too."""
    return field(default=parameter.settings.get("default"), repr=shown, metadata={"option": parameter})


@dataclass(frozen=True)
class StoreOptions:
    """A store and a tenant, as options name them."""

    store: str | None = _field(  # None where a command can do without
        option(
            "file:///folder, http://host:port, or s3://bucket/prefix?endpoint=http://host:port.", envvar="KVWIRE_STORE"
        )
    )
    token: str | None = _field(option("Bearer token for http stores.", envvar="KVWIRE_TOKEN"), shown=False)
    tenant: str = _field(option("Tenant that owns the documents.", default="default", envvar="KVWIRE_TENANT"))
    salt: str = _field(
        option(
            "Secret of the deployment, hashed into keys so that they do not show tenants.", default="",
            envvar="KVWIRE_SALT",
        ),
        shown=False,
    )  # fmt: skip
    keys: str | None = _field(option("File of master keys: objects are encrypted (kvwire key).", envvar="KVWIRE_KEYS"))
    cache: str | None = _field(CACHE)
    cache_size: str = _field(CACHE_SIZE)
    memory_size: str | None = _field(MEMORY_SIZE)

    def open(self) -> Store:
        """Open the store, behind its tiers where some were asked for."""
        from kvwire.store.schemes import open_store

        if self.store is None:
            raise ArgumentError("no store is named: give --store, or set KVWIRE_STORE")
        return open_store(
            self.store, token=self.token, cache=self.cache, cache_size=self.cache_size, memory_size=self.memory_size
        )

    def open_lasting(self, *, exists: bool = False) -> Store:
        """Open a store that outlives this process."""
        with ExitStack() as stack:
            opened = stack.enter_context(closing(self.open()))
            below = cast("TieredStore", opened).origin("") if hasattr(opened, "cache") else opened
            if not below.is_lasting:
                raise ArgumentError("a memory store ends with this command; name a folder, such as file:///path")
            if exists and not below.exists():
                what = f"{below.folder} is not a folder" if below.folder else f"there is no store at {below.url}"
                raise NotFoundError(f"{what}; check the address, or encode documents into it first")
            stack.pop_all()
        return opened

    def opened(self) -> closing[Store]:
        """Open a store that is there, and outlives this process, for a ``with`` block."""
        return closing(self.open_lasting(exists=True))

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


LINKS = option(
    "What stands around documents and in their caches: plain, kvlink:5, kvlink:5:evaluation, wrappers:8+8, "
    "anchors:100/25, links:5, turborag:IDS/IDS, block-attention:IDS; by default what the soft tokens were trained for.",
    metavar="LAYOUT",
)
SOFT_TOKENS = option(
    "File of trained embeddings outside the vocabulary, written by kvwire train-links.", metavar="FILE", type=FILE
)


def usual(options: type[T]) -> dict[str, Any]:
    """What the fields of a command's options are where nothing is given, before callbacks read it."""
    defaults: dict[str, Any] = {}
    for each in fields(options):
        settings = each.default.of(str(each.type)).settings if isinstance(each.default, Parameter) else {}
        several = settings.get("multiple") or settings.get("nargs") == -1
        nothing = () if several else False if settings.get("is_flag") else None
        defaults[each.name] = settings.get("default", nothing)
    return defaults


STORE: Any = object()
"""The default of a field that takes ``StoreOptions``, as ``command`` fills it."""


def command(
    options: type[T], name: str | None = None, group: click.Group | None = None
) -> Callable[[Callable[[T], None]], click.Command]:
    """Make a command of a function that takes its options as one dataclass, whose fields' defaults are parameters."""
    parameters: dict[str, Parameter] = {}
    store = {each.name: each.metadata["option"] for each in fields(StoreOptions)}
    for each in fields(options):
        if each.default is STORE:
            parameters |= store
        else:
            parameters[each.name] = cast("Parameter", each.default).of(str(each.type))
    place = next((each.name for each in fields(options) if each.default is STORE), None)

    def made(work: Callable[[T], None]) -> click.Command:
        @functools.wraps(work)
        def called(**given: Any) -> None:  # noqa: ANN401 - click's values
            if place:
                given[place] = StoreOptions(**{name: given.pop(name) for name in store})
            work(options(**given))

        whole: Command = called
        for spelt, parameter in reversed(parameters.items()):
            whole = parameter(whole, spelt)
        return (group or click).command(name)(whole)

    return made


def use_file(path: str | None) -> UseFile | None:
    """Where uses of documents are counted; None where ``--uses`` names no file."""
    from kvwire.store import UseFile

    return UseFile(path) if path else None


def repair_of(text: str) -> RepairMode | float:
    """``--repair`` as settings take it."""
    modes: dict[str, RepairMode] = {"none": "none", "auto": "auto", "all": "all"}
    if text in modes:
        return modes[text]
    try:
        return float(text)
    except ValueError as error:
        raise ArgumentError(f"--repair is none, auto, all or a share of rows from 0 to 1, got {text!r}") from error
