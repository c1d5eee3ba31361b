"""``kvwire profile``: profiles as files, and whether a corpus has outgrown the one that it is coded with."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import open_engine, read_file
from kvwire.cli.options import argument, command, option
from kvwire.cli.say import say, stages
from kvwire.codec import DEFAULT_METHOD, methods
from kvwire.errors import CorruptError, FormatVersionError, NotFoundError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.offline import ProfileCheck, ProfileSummary
    from kvwire.runtime.coding import Extent


_progress = logging.getLogger("kvwire.progress")


@click.group()
def profile() -> None:
    """Fit a profile once, look at it, and tell when a new one would pay."""


@dataclass(frozen=True)
class _FitOptions:
    """What ``kvwire profile fit`` is given."""

    model: str = argument(envvar="KVWIRE_MODEL")
    texts: tuple[str, ...] = option("Folder, file or glob of texts to fit on; repeatable.", required=True)
    out: Path = option("File to write, a .kvp.", required=True, type=opt.FILE)
    method: str = option(type=click.Choice(methods()), default=DEFAULT_METHOD)
    prefix_layers: int = opt.PREFIX_LAYERS
    calibration: Extent = opt.CALIBRATION
    resume: Path | None = opt.RESUME
    device: str = opt.DEVICE
    dtype: str = opt.DTYPE
    as_json: bool = opt.JSON


@command(_FitOptions, group=profile)
def fit(options: _FitOptions) -> None:
    """Fit a profile of MODEL, a folder, from texts, and write it to a file for kvwire encode --profile."""
    from kvwire.offline import find_documents, fit_profile_file, summarise
    from kvwire.runtime.coding import Coding

    out = options.out
    if not out.parent.is_dir():
        raise NotFoundError(f"{out.parent} is no folder; make it first")
    coding = Coding(options.method, options.prefix_layers, calibration=options.calibration, resume=options.resume)
    refs = find_documents(options.texts)
    with stages():
        _progress.info("opening %s", options.model)
        engine = open_engine(options.model, options.device, options.dtype)
        fitted = fit_profile_file(engine, refs, coding)
    part = out.with_name(f"{out.name}.part")
    try:
        part.write_bytes(fitted.data)
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(f"{out} cannot be written ({error.strerror}); look at free space and permissions") from error
    _print_summary(summarise(fitted), as_json=options.as_json)


@dataclass(frozen=True)
class _ShowOptions:
    """What ``kvwire profile show`` is given."""

    file: Path = argument()
    as_json: bool = opt.JSON


@command(_ShowOptions, group=profile)
def show(options: _ShowOptions) -> None:
    """Show what FILE, a .kvp, is: its model, what it was fitted on, and what its levels are expected to lose."""
    from kvwire.codec import read_profile
    from kvwire.offline import summarise

    file = options.file
    data = read_file(file, "name a .kvp file, as kvwire profile fit writes them")
    try:
        found = read_profile(data)
    except (CorruptError, FormatVersionError) as error:
        raise type(error)(f"{file}: {error}") from error
    _print_summary(summarise(found), as_json=options.as_json)


def _print_summary(found: ProfileSummary, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(asdict(found)))
        return
    say(f"profile {found.digest[:12]}, {found.bytes:,} bytes, method {found.method}")
    say(f"model {found.model or 'unknown'} ({found.revision[:12] or 'no revision'})")
    if found.prefix_layers:
        say(f"for readers that compute the first {found.prefix_layers} layers")
    say(f"fitted on {found.tokens:,} tokens" if found.tokens else "does not say what it was fitted on")
    for level in found.levels:
        kl = "KL not measured" if level.kl is None else f"KL about {level.kl:.2g} nats"
        say(f"{level.name:>10}  error about {level.error:.2g}  {kl}")


@dataclass(frozen=True)
class _CheckOptions:
    """What ``kvwire profile check`` is given."""

    manifest: str = argument(metavar="MANIFEST")
    level: str | None = option("Name of the level that is looked at; without it, the middle one.")
    as_json: bool = opt.JSON


@command(_CheckOptions, group=profile)
def check(options: _CheckOptions) -> None:
    """Tell from a manifest's measured errors whether a new profile would pay, and what encoding again costs.

    MANIFEST is what kvwire encode --manifest wrote. No model and no store is needed.
    """
    from kvwire.offline import check_profile, read_manifest

    found = check_profile(read_manifest(options.manifest), options.level)
    if options.as_json:
        say(json.dumps(asdict(found)))
        return
    _print(found)


def _print(found: ProfileCheck) -> None:
    say(f"level {found.level}: usual error {found.usual_error:.5f}, of {found.documents} documents")
    say("", f"{'documents':>10}{'tokens':>12}{'error':>10}{'bits/element':>14}  source")
    for group in found.groups:
        shown = f"{group.documents:>10}{group.tokens:>12}{group.error:>10.5f}{group.bits_per_element:>14.3f}"
        say(f"{shown}  {group.source}" + ("  (does not fit the profile)" if group.is_off else ""))
    share = found.off_tokens / found.tokens if found.tokens else 0.0
    say("", f"{found.off_documents} documents, {share:.0%} of the tokens, do not fit the profile in use")
    if found.older_documents:
        say(f"{found.older_documents} documents are coded with an older profile, which keeps them readable")
    if not found.pays:
        say("a new profile would not pay")
        return
    say(
        "a new profile would pay: kvwire encode SOURCES --refit fits it and encodes again, document by document; "
        "unless it was fitted with these sources already, which then are hard text"
    )
    if found.seconds is not None:
        say(f"that takes about {found.seconds / 3600:.2f} hours of one engine, and writes {found.bytes / 1e6:.1f} MB")
