"""``kvwire store gc``, ``index``, ``rebuild``, ``verify``: collect garbage, index, mend and check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import spaces_of
from kvwire.cli.options import StoreOptions, command, flag, option
from kvwire.cli.say import count_failures, finish, progress, say
from kvwire.errors import ArgumentError, CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.store import Catalog, Forgotten

JOBS = option("Objects handled in parallel.", default=4, type=click.IntRange(1, 64))
ALL_TENANTS = flag("Every tenant of the store, not only --tenant.")
_PART = option("One of N equal parts alone, which is a random sample too.", metavar="K/N", default="1/1")
_MOST_COLLECTED = 0.5
"""Part of all bytes that gc deletes without being told to."""


@dataclass(frozen=True)
class _GcOptions:
    """What ``kvwire store gc`` is given."""

    place: StoreOptions = opt.STORE
    all_tenants: bool = ALL_TENANTS
    grace: str = option("Keep content younger than this: 90s, 30m, 24h, 7d.", default="24h")
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
    as_json: bool = opt.JSON


@command(_GcOptions)
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
    with options.place.opened() as store, progress("looking at", "obj") as tell:
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
    finish(told, words, error, as_json=options.as_json)


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

    index: tuple[str, ...] = opt.INDEX
    place: StoreOptions = opt.STORE
    config: str = opt.CONFIG
    as_json: bool = opt.JSON


@command(_IndexOptions)
def index(options: _IndexOptions) -> None:
    """Let prompts find the documents that they begin with, for all that are encoded; by default in kvwire's own way."""
    from kvwire.store import Indexed, index_documents

    done = Indexed()
    with options.place.opened() as store, progress("indexing", "tok") as tell:
        catalog = options.place.catalog(store)
        for space in spaces_of(catalog, options.config):
            done += index_documents(catalog, space, options.index or ("kvwire",), tell)
    error = count_failures(
        done.failures, "documents could not be read and were left out: encode them again", as_json=options.as_json
    )
    words = f"wrote {done.entries} entries of {done.documents} documents; {done.left_out} begin no prompt"
    finish(asdict(done), words, error, as_json=options.as_json)


@dataclass(frozen=True)
class _RebuildOptions:
    """What ``kvwire store rebuild`` is given."""

    place: StoreOptions = opt.STORE
    all_tenants: bool = ALL_TENANTS
    dry_run: bool = flag("Write nothing; print what would be written.")
    as_json: bool = opt.JSON


@command(_RebuildOptions)
def rebuild(options: _RebuildOptions) -> None:
    """Make a lost catalog anew from blobs and texts. Entries that lead somewhere stay; nothing is deleted."""
    from kvwire.store import rebuild as rebuild_store

    with options.place.opened() as store, progress("looking at", "obj") as tell:
        tenant = None if options.all_tenants else options.place.catalog(store).tenant
        done = rebuild_store(
            store, tenant_hash=tenant, keyring=options.place.keyring(), dry_run=options.dry_run, on_progress=tell
        )
    error = count_failures(
        done.failures, "objects could not be read, and the catalog does not lead to them", as_json=options.as_json
    )
    words = (
        f"{'would write' if options.dry_run else 'wrote'} entries of {done.documents} documents and of {done.texts} "
        f"texts, {done.unnamed} of them under the name recovered-DIGEST, {done.profiles} pointers to profiles; "
        f"{done.kept} entries were there"
    )
    if done.unnamed:
        words += "; encode those documents again under their names, which computes nothing"
    finish(asdict(done) | {"dry_run": options.dry_run}, words, error, as_json=options.as_json)


@dataclass(frozen=True)
class _VerifyOptions:
    """What ``kvwire store verify`` is given."""

    place: StoreOptions = opt.STORE
    all_tenants: bool = ALL_TENANTS
    jobs: int = JOBS
    delete_damaged: bool = flag("Delete what is damaged, so that it is encoded again.")
    part: str = _PART
    as_json: bool = opt.JSON


@command(_VerifyOptions)
def verify(options: _VerifyOptions) -> None:
    """Read every blob, profile, text and entry, and check that it is what was written."""
    from kvwire.store import Catalog, Part, tenants, verify_store

    chosen = Part.parse(options.part)

    with options.place.opened() as store, progress("checking", "B") as tell:
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
    finish(asdict(found), words, error, as_json=options.as_json)
