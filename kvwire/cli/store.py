"""``kvwire store``: look into a store, take documents out, collect garbage, check all, copy it. No model is needed."""

from __future__ import annotations

import json
import re
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from kvwire.cli.failures import error_as_data, leave
from kvwire.cli.options import INDEX, StoreOptions, store_options, takes
from kvwire.cli.printing import describe, print_levels
from kvwire.cli.progress import progress
from kvwire.cli.say import say
from kvwire.errors import ArgumentError, CorruptError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvwire.errors import KvwireError
    from kvwire.store import Catalog, CatalogEntry, KeySpace, Listed, Store

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout; lists: one object a line.")
_CONFIG = click.option("--config", default="", metavar="PREFIX", help="Model configuration, as --configs lists them.")
_ALL = click.option("--all-tenants", is_flag=True, help="Every tenant of the store, not only --tenant.")
_JOBS = click.option("--jobs", default=4, show_default=True, type=click.IntRange(1, 64), help="Objects at once.")
_PART = click.option(
    "--part", metavar="K/N", default="1/1", help="One of N equal parts alone, which is a random sample too."
)
_MOST_COLLECTED = 0.5
"""Part of all bytes that gc deletes without being told to."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)")


@click.group("store")
def store_group() -> None:
    """Look into a store, take documents out, collect garbage, check, copy."""


@store_group.command()
@store_options
@takes(_CONFIG)
@click.option("--tenants", "what", flag_value="tenants", help="List tenants, by their hashes, instead of documents.")
@click.option("--configs", "what", flag_value="configs", help="List the tenant's model configurations.")
@click.option("--keys-of", "prefix", metavar="PREFIX", help="List all keys that start with this, with sizes.")
@click.option("--after", default="", help="Go on behind this key, the last of a list that was cut off.")
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@takes(_JSON)
def ls(
    *,
    place: StoreOptions,
    config: str,
    what: str | None,
    prefix: str | None,
    after: str,
    limit: int | None,
    as_json: bool,
) -> None:
    """List documents: id, tokens, bytes of the blob, levels. In no useful order, as it comes."""
    from kvwire.store import tenants

    failures: list[str] = []
    with _opened(place) as store:
        catalog = place.catalog(store)
        rows: Iterable[dict[str, Any]]
        if prefix is not None:
            rows = (_key_row(listed) for listed in store.scan(prefix, after))
        elif what == "tenants":
            rows = ({"tenant": tenant} for tenant in tenants(store))
        elif what == "configs":
            rows = ({"config": space.config} for space in catalog.configurations())
        else:
            rows = _document_rows(catalog, _spaces(catalog, config), after, failures)
        for row in islice(rows, limit):
            say(json.dumps(row) if as_json else "  ".join(_words(row)))
    if failures:
        msg = f"{len(failures)} entries cannot be read, the first of them {failures[0]}"
        raise CorruptError(msg)


@store_group.command()
@click.argument("document")
@store_options
@takes(_CONFIG)
@takes(_JSON)
def stat(*, document: str, place: StoreOptions, config: str, as_json: bool) -> None:
    """Show a document's entry and what its blob says about itself."""
    with _opened(place) as store:
        catalog = place.catalog(store)
        space, entry = _find(catalog, config, document)
        info = None if entry.is_text else catalog.read_header(entry)
    if as_json:
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


@store_group.command()
@click.argument("documents", nargs=-1, required=True)
@store_options
@takes(_CONFIG)
@takes(_JSON)
def rm(*, documents: tuple[str, ...], place: StoreOptions, config: str, as_json: bool) -> None:
    """Take documents out of the catalog. What they named goes when garbage is collected (gc)."""
    removed: list[str] = []
    absent: list[str] = []
    with _opened(place) as store:
        catalog = place.catalog(store)
        spaces = list(_spaces(catalog, config))
        for document in documents:
            found = [catalog.remove(space, document) for space in spaces]
            (removed if any(found) else absent).append(document)
    error = None
    if absent:
        error = NotFoundError(f"not in the catalog: {', '.join(absent)}; see kvwire store ls, --tenant and --config")
    _finish({"removed": removed, "absent": absent}, f"removed {len(removed)}", error, as_json=as_json)


@store_group.command()
@store_options
@takes(_ALL)
@click.option("--grace", default="24h", show_default=True, help="Younger content stays: 90s, 30m, 24h, 7d.")
@click.option("--dry-run", is_flag=True, help="Delete nothing, and tell what would be.")
@click.option("--yes", is_flag=True, help="Delete even more than half of all bytes, or of all documents'.")
@click.option("--allow-empty-catalog", is_flag=True, help="Collect where the catalog names nothing that is there.")
@takes(_PART)
@click.option(
    "--parts",
    default=1,
    metavar="N",
    type=click.IntRange(1, 65536),
    help=(
        "The whole as N parts, one after the other: an Nth of the memory. Entries are read once, into a temporary file "
        "of some 34 bytes for each object that is named; TMPDIR has to be on a disk with room for it, not in memory."
    ),
)
@takes(_JSON)
def gc(  # noqa: PLR0913 - its options
    *,
    place: StoreOptions,
    all_tenants: bool,
    grace: str,
    dry_run: bool,
    yes: bool,
    allow_empty_catalog: bool,
    part: str,
    parts: int,
    as_json: bool,
) -> None:
    """Delete blobs, profiles and texts that no document names any more. Safe while others read and write."""
    from kvwire.store import Part, collect

    grace_s, chosen = _seconds(grace), Part.parse(part)
    with _opened(place) as store, progress("looking at", "obj") as tell:
        tenant = None if all_tenants else place.catalog(store).tenant
        done = collect(
            store,
            tenant_hash=tenant,
            keyring=place.keyring(),
            grace_s=grace_s,
            dry_run=dry_run,
            max_fraction=1.0 if yes else _MOST_COLLECTED,
            allow_empty_catalog=allow_empty_catalog,
            part=chosen,
            parts=parts,
            on_progress=lambda _, count: tell(count),
        )
    error = CorruptError(f"left alone: {'; '.join(done.failures)}") if done.failures else None
    words = (
        f"{'would delete' if dry_run else 'deleted'} {done.blobs} blobs, {done.profiles} profiles, {done.texts} texts, "
        f"{done.entries} entries of tokens, {done.leftovers} unfinished files: {done.bytes:,} of {done.looked_at:,} "
        "bytes"
    )
    if done.misplaced:
        words += f"; {done.misplaced} objects lie where nothing leads to them: kvwire store verify names them"
    _finish(asdict(done) | {"dry_run": dry_run}, words, error, as_json=as_json)


@store_group.command()
@takes(INDEX)
@store_options
@takes(_CONFIG)
@takes(_JSON)
def index(*, place: StoreOptions, index: tuple[str, ...], config: str, as_json: bool) -> None:
    """Let prompts find the documents that they begin with, for all that are encoded; by default in kvwire's own way."""
    from kvwire.store import Indexed, index_documents

    done = Indexed()
    with _opened(place) as store, progress("indexing", "tok") as tell:
        catalog = place.catalog(store)
        for space in _spaces(catalog, config):
            done += index_documents(catalog, space, index or ("kvwire",), tell)
    for failure in done.failures if not as_json else ():
        say(failure, err=True)
    error = None
    if done.failures:
        error = CorruptError(f"{len(done.failures)} documents could not be read and were left out: encode them again")
    words = f"wrote {done.entries} entries of {done.documents} documents; {done.left_out} begin no prompt"
    _finish(asdict(done), words, error, as_json=as_json)


@store_group.command()
@store_options
@takes(_ALL)
@click.option("--dry-run", is_flag=True, help="Write nothing, and tell what would be.")
@takes(_JSON)
def rebuild(*, place: StoreOptions, all_tenants: bool, dry_run: bool, as_json: bool) -> None:
    """Make a lost catalog anew from blobs and texts. Entries that lead somewhere stay; nothing is deleted."""
    from kvwire.store import rebuild as rebuild_store

    with _opened(place) as store, progress("looking at", "obj") as tell:
        tenant = None if all_tenants else place.catalog(store).tenant
        done = rebuild_store(store, tenant_hash=tenant, keyring=place.keyring(), dry_run=dry_run, on_progress=tell)
    for failure in done.failures if not as_json else ():
        say(failure, err=True)
    error = None
    if done.failures:
        error = CorruptError(f"{len(done.failures)} objects could not be read, and the catalog does not lead to them")
    words = (
        f"{'would write' if dry_run else 'wrote'} entries of {done.documents} documents and of {done.texts} texts, "
        f"{done.unnamed} of them under the name recovered-DIGEST, {done.profiles} pointers to profiles; "
        f"{done.kept} entries were there"
    )
    if done.unnamed:
        words += "; encode those documents again under their names, which computes nothing"
    _finish(asdict(done) | {"dry_run": dry_run}, words, error, as_json=as_json)


@store_group.command()
@store_options
@takes(_ALL)
@takes(_JOBS)
@click.option("--delete-damaged", is_flag=True, help="Delete what is damaged, so that it is encoded again.")
@takes(_PART)
@takes(_JSON)
def verify(
    *, place: StoreOptions, all_tenants: bool, jobs: int, delete_damaged: bool, part: str, as_json: bool
) -> None:
    """Read every blob, profile, text and entry, and check that it is what was written."""
    from kvwire.store import Catalog, Part, tenants, verify_store

    chosen = Part.parse(part)

    with _opened(place) as store, progress("checking", "B") as tell:
        keyring = place.keyring()
        catalogs: Iterable[Catalog] = [place.catalog(store)]
        if all_tenants:
            catalogs = (Catalog.of_hash(store, tenant, keyring=keyring) for tenant in tenants(store))
        found = verify_store(store, catalogs, jobs=jobs, delete_damaged=delete_damaged, part=chosen, on_progress=tell)
    for damage in found.damaged if not as_json else ():
        say(f"{damage.key}: {damage.problem}{' (deleted)' if damage.deleted else ''}", err=True)
    error = None
    if found.damaged:
        error = CorruptError(f"{len(found.damaged)} of {found.objects + found.entries} objects and entries are damaged")
    words = f"{found.objects} objects, {found.bytes:,} bytes and {found.entries} entries looked at"
    if found.sealed:
        words += f"; {found.sealed} objects are sealed: what they hold was not looked at"
    _finish(asdict(found), words, error, as_json=as_json)


@store_group.command()
@click.argument("source")
@click.argument("target")
@click.option("--token", envvar="KVWIRE_TOKEN", help="Bearer token for SOURCE, where that is http.")
@click.option("--to-token", envvar="KVWIRE_TO_TOKEN", help="Bearer token for TARGET.")
@takes(_JOBS)
@takes(_JSON)
def cp(*, source: str, target: str, token: str | None, to_token: str | None, jobs: int, as_json: bool) -> None:
    """Copy a store into another: all tenants, content first, entries last. Goes on where it was interrupted."""
    from kvwire.store import copy_store
    from kvwire.store.schemes import open_store

    for address in (source, target):
        if address.startswith("memory:"):
            msg = "a memory store ends with this command; name a folder, an http server or a bucket"
            raise ArgumentError(msg)
    with (
        closing(open_store(source, token=token)) as ours,
        closing(open_store(target, token=to_token)) as theirs,
        progress("copying", "B") as tell,
    ):
        done = copy_store(ours, theirs, jobs=jobs, on_progress=tell)
    for failure in done.failures if not as_json else ():
        say(failure, err=True)
    error = None
    if done.failures:
        error = CorruptError(f"{len(done.failures)} objects are damaged where they come from and were left out")
    words = f"copied {done.objects} objects, {done.bytes:,} bytes, {done.entries} entries; {done.skipped} were there"
    _finish(asdict(done), words, error, as_json=as_json)


@contextmanager
def _opened(place: StoreOptions) -> Iterator[Store]:
    with closing(place.open_lasting(exists=True)) as store:
        yield store


def _spaces(catalog: Catalog, prefix: str) -> Iterator[KeySpace]:
    return (space for space in catalog.configurations() if space.config.startswith(prefix))


def _find(catalog: Catalog, config: str, document: str) -> tuple[KeySpace, CatalogEntry]:
    """A document's entry, in the one configuration that has it."""
    spaces = list(_spaces(catalog, config))
    found = [(space, entry) for space in spaces if (entry := catalog.by_document(space, document)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(space.config for space, _ in found)
        msg = f"several model configurations have {document!r}: choose one with --config: {names}"
        raise ArgumentError(msg)
    msg = (
        f"{document!r} is not in {catalog.store.url}, where this tenant has {len(spaces)} model configurations; "
        "see kvwire store ls, --tenant and --config"
    )
    raise NotFoundError(msg)


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


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        msg = f"{text!r} is no length of time: write 90s, 30m, 24h or 7d"
        raise ArgumentError(msg)
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _finish(about: dict[str, Any], words: str, error: KvwireError | None, *, as_json: bool) -> None:
    """Print what was done, and leave with the error's exit code where there was one."""
    say(json.dumps(about | error_as_data(error)) if as_json else words)
    if error is not None:
        leave(error)
