"""``kvwire store``: look into a store, take documents out, collect garbage, check all, copy it. No model is needed."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from kvwire.cli import options as opt
from kvwire.cli.inputs import find_entry, spaces_of
from kvwire.cli.options import StoreOptions, argument, command, flag, option
from kvwire.cli.printing import describe, print_levels
from kvwire.cli.say import count_failures, finish, progress, say
from kvwire.cli.store_upkeep import JOBS, gc, index, rebuild, verify
from kvwire.errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvwire.errors import KvwireError
    from kvwire.store import Catalog, KeySpace, Listed


@click.group()
def store() -> None:
    """Look into a store, take documents out, collect garbage, check, copy."""


for each in (gc, index, rebuild, verify):
    store.add_command(each)


@dataclass(frozen=True)
class _LsOptions:
    """What ``kvwire store ls`` is given."""

    place: StoreOptions = opt.STORE
    config: str = opt.CONFIG
    tenants: bool = flag("List tenants, by their hashes, instead of documents.")
    configs: bool = flag("List the tenant's model configurations.")
    prefix: str | None = option(
        "List all keys that start with this, with sizes.", "--keys-of", "prefix", metavar="PREFIX"
    )
    after: str = option("Continue after this key, the last of a list that was cut off.", default="")
    limit: int | None = option("Most rows to list.", type=click.IntRange(1))
    as_json: bool = flag("Print JSON on stdout: one object a line.", "--json", "as_json")


@command(_LsOptions, group=store)
def ls(options: _LsOptions) -> None:
    """List documents: id, tokens, bytes of the blob, levels. In no useful order, as it comes."""
    from kvwire.store import tenants

    failures: list[str] = []
    with options.place.opened() as store:
        catalog = options.place.catalog(store)
        rows: Iterable[dict[str, Any]]
        if options.prefix is not None:
            rows = (_key_row(listed) for listed in store.scan(options.prefix, options.after))
        elif options.tenants:
            rows = ({"tenant": tenant} for tenant in tenants(store))
        elif options.configs:
            rows = ({"config": space.config} for space in catalog.configurations())
        else:
            rows = _document_rows(catalog, spaces_of(catalog, options.config), options.after, failures)
        for row in islice(rows, options.limit):
            say(json.dumps(row) if options.as_json else "  ".join(_words(row)))
    if failures:
        raise CorruptError(f"{len(failures)} entries cannot be read, the first of them {failures[0]}")


@dataclass(frozen=True)
class _StatOptions:
    """What ``kvwire store stat`` is given."""

    document: str = argument()
    place: StoreOptions = opt.STORE
    config: str = opt.CONFIG
    as_json: bool = opt.JSON


@command(_StatOptions, group=store)
def stat(options: _StatOptions) -> None:
    """Show a document's entry and what its blob says about itself."""
    with options.place.opened() as store:
        catalog = options.place.catalog(store)
        space, entry = find_entry(catalog, options.config, options.document)
        info = None if entry.is_text else catalog.blobs.header(entry)
    if options.as_json:
        about = to_builtins(entry) | {"config": space.config, "is_text": entry.is_text}
        say(json.dumps(about | ({"blob": describe(info)} if info else {})))
        return
    say(f"{entry.document_id}: {entry.tokens} tokens, configuration {space.config}")
    say(f"token digest {entry.token_digest or 'unknown'}")
    if info is None:
        say("kept as text: there is no blob")
        return
    parts = f" in {len(entry.parts)} parts, the first of which this is" if entry.parts else ""
    say(entry.blob_key, f"{entry.size:,} bytes (header {entry.header_bytes:,}){parts}")
    say(f"model {info.meta.model_id}, profile {entry.profile_digest[:12] or 'inside'}, method {info.method}")
    print_levels([info])


@dataclass(frozen=True)
class _RmOptions:
    """What ``kvwire store rm`` is given."""

    documents: tuple[str, ...] = argument(nargs=-1, required=True)
    place: StoreOptions = opt.STORE
    config: str = opt.CONFIG
    as_json: bool = opt.JSON


@command(_RmOptions, group=store)
def rm(options: _RmOptions) -> None:
    """Take documents out of the catalog. What they named goes when garbage is collected (gc)."""
    removed: list[str] = []
    absent: list[str] = []
    with options.place.opened() as store:
        catalog = options.place.catalog(store)
        spaces = list(spaces_of(catalog, options.config))
        for document in dict.fromkeys(options.documents):
            found = [catalog.remove(space, document) for space in spaces]
            (removed if any(found) else absent).append(document)
    error = None
    if absent:
        error = NotFoundError(f"not in the catalog: {', '.join(absent)}; see kvwire store ls, --tenant and --config")
    finish({"removed": removed, "absent": absent}, f"removed {len(removed)}", error, as_json=options.as_json)


@dataclass(frozen=True)
class _CpOptions:
    """What ``kvwire store cp`` is given."""

    source: str = argument()
    target: str = argument()
    token: str | None = option("Bearer token for SOURCE, where that is http.", envvar="KVWIRE_TOKEN")
    to_token: str | None = option("Bearer token for TARGET.", envvar="KVWIRE_TO_TOKEN")
    jobs: int = JOBS
    as_json: bool = opt.JSON


@command(_CpOptions, group=store)
def cp(options: _CpOptions) -> None:
    """Copy a store into another: all tenants, content first, entries last. Goes on where it was interrupted."""
    from kvwire.store import copy_store

    with (
        StoreOptions(options.source, options.token).opened() as ours,
        closing(StoreOptions(options.target, options.to_token).open_lasting()) as theirs,
        progress("copying", "B") as tell,
    ):
        done = copy_store(ours, theirs, jobs=options.jobs, on_progress=tell)
    error = count_failures(
        done.failures, "objects are damaged where they come from and were left out", as_json=options.as_json
    )
    words = f"copied {done.objects} objects, {done.bytes:,} bytes, {done.entries} entries; {done.skipped} were there"
    finish(asdict(done), words, error, as_json=options.as_json)


def _document_rows(
    catalog: Catalog, spaces: Iterable[KeySpace], after: str, failures: list[str]
) -> Iterator[dict[str, Any]]:
    def failed(key: str, error: KvwireError) -> None:
        failures.append(f"{key}: {error}")

    for space in spaces:
        if after and not (after.startswith(space.documents) or space.documents > after):
            continue
        start = after if after.startswith(space.documents) else ""
        for entry in catalog.documents(space, on_error=failed, after=start):
            yield {
                "id": entry.document_id,
                "tokens": entry.tokens,
                "bytes": entry.size,
                "levels": [name for name, _ in entry.levels],
                "config": space.config,
                "key": space.document(entry.document_id),
            }


def _key_row(listed: Listed) -> dict[str, Any]:
    return {"key": listed.key, "bytes": listed.size, "modified": listed.modified}


def _words(row: dict[str, Any]) -> Iterator[str]:
    """A row for people."""
    if "id" in row:
        levels = ",".join(row["levels"])
        yield from (row["config"], f"{row['tokens']:>9}", f"{row['bytes']:>13,}", levels or "text", row["id"])
    elif "key" in row:
        yield from (f"{row['bytes']:>13,}", row["key"])
    else:
        yield from row.values()
