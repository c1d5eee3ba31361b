"""``kvwire store``: look into a store, take documents out, collect garbage, check all, copy it. No model is needed."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from kvwire.cli.options import INDEX, STORE, StoreOptions, argument, command, flag, option
from kvwire.cli.printing import describe, print_levels
from kvwire.cli.say import error_as_data, leave, progress, say
from kvwire.errors import ArgumentError, CorruptError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvwire.errors import KvwireError
    from kvwire.store import Catalog, CatalogEntry, Forgotten, KeySpace, Listed, Store

_JSON = flag("Print JSON on stdout; lists: one object a line.", "--json", "as_json")
_CONFIG = option("Model configuration, as --configs lists them.", default="", metavar="PREFIX")
_ALL = flag("Every tenant of the store, not only --tenant.")
_JOBS = option("Objects handled in parallel.", default=4, show_default=True, type=click.IntRange(1, 64))
_PART = option("One of N equal parts alone, which is a random sample too.", metavar="K/N", default="1/1")
_MOST_COLLECTED = 0.5
"""Part of all bytes that gc deletes without being told to."""


@click.group("store")
def store_group() -> None:
    """Look into a store, take documents out, collect garbage, check, copy."""


@dataclass(frozen=True)
class _LsOptions:
    """What ``kvwire store ls`` is given."""

    place: StoreOptions = STORE
    config: str = _CONFIG
    tenants: bool = flag("List tenants, by their hashes, instead of documents.")
    configs: bool = flag("List the tenant's model configurations.")
    prefix: str | None = option(
        "List all keys that start with this, with sizes.", "--keys-of", "prefix", metavar="PREFIX"
    )
    after: str = option("Continue after this key, the last of a list that was cut off.", default="")
    limit: int | None = option("Most rows to list.", type=click.IntRange(1))
    as_json: bool = _JSON


@command(_LsOptions, group=store_group)
def ls(options: _LsOptions) -> None:
    """List documents: id, tokens, bytes of the blob, levels. In no useful order, as it comes."""
    from kvwire.store import tenants

    failures: list[str] = []
    with _opened(options.place) as store:
        catalog = options.place.catalog(store)
        rows: Iterable[dict[str, Any]]
        if options.prefix is not None:
            rows = (_key_row(listed) for listed in store.scan(options.prefix, options.after))
        elif options.tenants:
            rows = ({"tenant": tenant} for tenant in tenants(store))
        elif options.configs:
            rows = ({"config": space.config} for space in catalog.configurations())
        else:
            rows = _document_rows(catalog, _spaces(catalog, options.config), options.after, failures)
        for row in islice(rows, options.limit):
            say(json.dumps(row) if options.as_json else "  ".join(_words(row)))
    if failures:
        raise CorruptError(f"{len(failures)} entries cannot be read, the first of them {failures[0]}")


@dataclass(frozen=True)
class _StatOptions:
    """What ``kvwire store stat`` is given."""

    document: str = argument()
    place: StoreOptions = STORE
    config: str = _CONFIG
    as_json: bool = _JSON


@command(_StatOptions, group=store_group)
def stat(options: _StatOptions) -> None:
    """Show a document's entry and what its blob says about itself."""
    with _opened(options.place) as store:
        catalog = options.place.catalog(store)
        space, entry = _find(catalog, options.config, options.document)
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
    place: StoreOptions = STORE
    config: str = _CONFIG
    as_json: bool = _JSON


@command(_RmOptions, group=store_group)
def rm(options: _RmOptions) -> None:
    """Take documents out of the catalog. What they named goes when garbage is collected (gc)."""
    removed: list[str] = []
    absent: list[str] = []
    with _opened(options.place) as store:
        catalog = options.place.catalog(store)
        spaces = list(_spaces(catalog, options.config))
        for document in options.documents:
            found = [catalog.remove(space, document) for space in spaces]
            (removed if any(found) else absent).append(document)
    error = None
    if absent:
        error = NotFoundError(f"not in the catalog: {', '.join(absent)}; see kvwire store ls, --tenant and --config")
    _finish({"removed": removed, "absent": absent}, f"removed {len(removed)}", error, as_json=options.as_json)


@dataclass(frozen=True)
class _GcOptions:
    """What ``kvwire store gc`` is given."""

    place: StoreOptions = STORE
    all_tenants: bool = _ALL
    grace: str = option("Keep content younger than this: 90s, 30m, 24h, 7d.", default="24h", show_default=True)
    dry_run: bool = flag("Delete nothing; print what would be deleted.")
    keep: str | None = option(
        "Forget saved prompts and sessions first, the longest unused before others, until no more than this is left: "
        "500GB, 20GiB.",
        metavar="SIZE",
    )
    unused: str | None = option(
        "Forget saved prompts and sessions that were not used for so long; with --keep only as many as that needs.",
        metavar="AGE",
    )
    named: bool = flag("Forget documents that were encoded by name, too; those count as used when they were written.")
    yes: bool = flag("Delete even more than half of all bytes, or of all documents'.")
    allow_empty_catalog: bool = flag("Collect even if the catalog is empty or names nothing that exists.")
    part: str = _PART
    as_json: bool = _JSON


@command(_GcOptions, group=store_group)
def gc(options: _GcOptions) -> None:
    """Delete blobs, profiles and texts that no document names any more. Safe while others read and write.

    With --keep or --unused, saved prompts and sessions are forgotten before, the least recently used first.
    """
    from kvwire.cli.inputs import read_seconds
    from kvwire.store import Forgotten, Part, collect, forget, parse_size

    grace_s, chosen = read_seconds(options.grace), Part.parse(options.part)
    keep_bytes = inf if options.keep is None else parse_size(options.keep)
    unused_s = 0.0 if options.unused is None else read_seconds(options.unused)
    forgets, forgotten = options.keep is not None or options.unused is not None, Forgotten()
    if options.named and not forgets:
        raise ArgumentError("--named says what may be forgotten: pass --keep SIZE or --unused AGE, too")
    with _opened(options.place) as store, progress("looking at", "obj") as tell:
        both: dict[str, Any] = {
            "tenant_hash": None if options.all_tenants else options.place.catalog(store).tenant,
            "keyring": options.place.keyring(), "grace_s": grace_s, "dry_run": options.dry_run,
            "max_fraction": 1.0 if options.yes else _MOST_COLLECTED, "on_progress": lambda _, count: tell(count),
        }  # fmt: skip
        if forgets:
            forgotten = forget(store, keep_bytes=keep_bytes, unused_s=unused_s, named=options.named, **both)
        done = collect(store, allow_empty_catalog=options.allow_empty_catalog, part=chosen, **both)
    failures = (*forgotten.failures, *done.failures)
    error = CorruptError(f"left alone: {'; '.join(failures)}") if failures else None
    verb = "would delete" if options.dry_run else "deleted"
    words = (
        f"{verb} {done.blobs} blobs, {done.profiles} profiles, {done.texts} texts, "
        f"{done.entries} entries of tokens, {done.leftovers} unfinished files: {done.bytes:,} of {done.looked_at:,} "
        "bytes"
    )
    if done.misplaced:
        words += f"; {done.misplaced} objects lie where nothing leads to them: kvwire store verify names them"
    told: dict[str, Any] = asdict(done) | {"dry_run": options.dry_run}
    if forgets:
        told["forgotten"] = {name: value for name, value in asdict(forgotten).items() if name != "failures"}
        words = f"{_forgotten_words(forgotten, keep_bytes, named=options.named, dry_run=options.dry_run)}; {words}"
    _finish(told, words, error, as_json=options.as_json)


def _forgotten_words(done: Forgotten, keep_bytes: float, *, named: bool, dry_run: bool) -> str:
    """What was forgotten, and why no more of it was where more was wanted."""
    words = f"{'would forget' if dry_run else 'forgot'} {done.documents} documents, {done.bytes:,} bytes"
    if keep_bytes < inf:
        words += f"; {done.left:,} bytes are left"
        if done.left > keep_bytes:
            words += ", the rest of which is in use" + ("" if named else " or was encoded by name (--named)")
    return words


@dataclass(frozen=True)
class _IndexOptions:
    """What ``kvwire store index`` is given."""

    index: tuple[str, ...] = INDEX
    place: StoreOptions = STORE
    config: str = _CONFIG
    as_json: bool = _JSON


@command(_IndexOptions, group=store_group)
def index(options: _IndexOptions) -> None:
    """Let prompts find the documents that they begin with, for all that are encoded; by default in kvwire's own way."""
    from kvwire.store import Indexed, index_documents

    done = Indexed()
    with _opened(options.place) as store, progress("indexing", "tok") as tell:
        catalog = options.place.catalog(store)
        for space in _spaces(catalog, options.config):
            done += index_documents(catalog, space, options.index or ("kvwire",), tell)
    error = _failed(
        done.failures, "documents could not be read and were left out: encode them again", as_json=options.as_json
    )
    words = f"wrote {done.entries} entries of {done.documents} documents; {done.left_out} begin no prompt"
    _finish(asdict(done), words, error, as_json=options.as_json)


@dataclass(frozen=True)
class _RebuildOptions:
    """What ``kvwire store rebuild`` is given."""

    place: StoreOptions = STORE
    all_tenants: bool = _ALL
    dry_run: bool = flag("Write nothing; print what would be written.")
    as_json: bool = _JSON


@command(_RebuildOptions, group=store_group)
def rebuild(options: _RebuildOptions) -> None:
    """Make a lost catalog anew from blobs and texts. Entries that lead somewhere stay; nothing is deleted."""
    from kvwire.store import rebuild as rebuild_store

    with _opened(options.place) as store, progress("looking at", "obj") as tell:
        tenant = None if options.all_tenants else options.place.catalog(store).tenant
        done = rebuild_store(
            store, tenant_hash=tenant, keyring=options.place.keyring(), dry_run=options.dry_run, on_progress=tell
        )
    error = _failed(
        done.failures, "objects could not be read, and the catalog does not lead to them", as_json=options.as_json
    )
    words = (
        f"{'would write' if options.dry_run else 'wrote'} entries of {done.documents} documents and of {done.texts} "
        f"texts, {done.unnamed} of them under the name recovered-DIGEST, {done.profiles} pointers to profiles; "
        f"{done.kept} entries were there"
    )
    if done.unnamed:
        words += "; encode those documents again under their names, which computes nothing"
    _finish(asdict(done) | {"dry_run": options.dry_run}, words, error, as_json=options.as_json)


@dataclass(frozen=True)
class _VerifyOptions:
    """What ``kvwire store verify`` is given."""

    place: StoreOptions = STORE
    all_tenants: bool = _ALL
    jobs: int = _JOBS
    delete_damaged: bool = flag("Delete what is damaged, so that it is encoded again.")
    part: str = _PART
    as_json: bool = _JSON


@command(_VerifyOptions, group=store_group)
def verify(options: _VerifyOptions) -> None:
    """Read every blob, profile, text and entry, and check that it is what was written."""
    from kvwire.store import Catalog, Part, tenants, verify_store

    chosen = Part.parse(options.part)

    with _opened(options.place) as store, progress("checking", "B") as tell:
        keyring = options.place.keyring()
        catalogs: Iterable[Catalog] = [options.place.catalog(store)]
        if options.all_tenants:
            catalogs = (Catalog.of_hash(store, tenant, keyring=keyring) for tenant in tenants(store))
        found = verify_store(
            store, catalogs, jobs=options.jobs, delete_damaged=options.delete_damaged, part=chosen, on_progress=tell
        )
    for damage in found.damaged if not options.as_json else ():
        say(f"{damage.key}: {damage.problem}{' (deleted)' if damage.deleted else ''}", err=True)
    error = None
    if found.damaged:
        error = CorruptError(f"{len(found.damaged)} of {found.objects + found.entries} objects and entries are damaged")
    words = f"{found.objects} objects, {found.bytes:,} bytes and {found.entries} entries looked at"
    if found.sealed:
        words += f"; {found.sealed} objects are sealed: what they hold was not looked at"
    _finish(asdict(found), words, error, as_json=options.as_json)


@dataclass(frozen=True)
class _CpOptions:
    """What ``kvwire store cp`` is given."""

    source: str = argument()
    target: str = argument()
    token: str | None = option("Bearer token for SOURCE, where that is http.", envvar="KVWIRE_TOKEN")
    to_token: str | None = option("Bearer token for TARGET.", envvar="KVWIRE_TO_TOKEN")
    jobs: int = _JOBS
    as_json: bool = _JSON


@command(_CpOptions, group=store_group)
def cp(options: _CpOptions) -> None:
    """Copy a store into another: all tenants, content first, entries last. Goes on where it was interrupted."""
    from kvwire.store import copy_store

    with (
        closing(StoreOptions(options.source, options.token).open_lasting(exists=True)) as ours,
        closing(StoreOptions(options.target, options.to_token).open_lasting()) as theirs,
        progress("copying", "B") as tell,
    ):
        done = copy_store(ours, theirs, jobs=options.jobs, on_progress=tell)
    error = _failed(
        done.failures, "objects are damaged where they come from and were left out", as_json=options.as_json
    )
    words = f"copied {done.objects} objects, {done.bytes:,} bytes, {done.entries} entries; {done.skipped} were there"
    _finish(asdict(done), words, error, as_json=options.as_json)


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
        raise ArgumentError(f"several model configurations have {document!r}: choose one with --config: {names}")
    raise NotFoundError(
        f"{document!r} is not in {catalog.store.url}, where this tenant has {len(spaces)} model configurations; "
        "see kvwire store ls, --tenant and --config"
    )


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


def _failed(failures: Sequence[str], words: str, *, as_json: bool) -> CorruptError | None:
    """Tell people of each failure; the error that counts them."""
    for failure in failures if not as_json else ():
        say(failure, err=True)
    return CorruptError(f"{len(failures)} {words}") if failures else None


def _finish(about: dict[str, Any], words: str, error: KvwireError | None, *, as_json: bool) -> None:
    """Print what was done, and leave with the error's exit code where there was one."""
    say(json.dumps(about | error_as_data(error)) if as_json else words)
    if error is not None:
        leave(error)
