"""``kvwire profile``: whether a corpus has outgrown the profile that it is coded with."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvwire.cli.options import JSON
from kvwire.cli.say import say

if TYPE_CHECKING:
    from kvwire.offline import ProfileCheck


@click.group("profile")
def profile_group() -> None:
    """Tell when a new profile would pay."""


@profile_group.command()
@click.argument("manifest", metavar="MANIFEST")
@click.option("--level", help="Name of the level that is looked at; without it, the middle one.")
@JSON
def check(manifest: str, level: str | None, *, as_json: bool) -> None:
    """Tell from a manifest's measured errors whether a new profile would pay, and what encoding again costs.

    MANIFEST is what kvwire encode --manifest wrote. No model and no store is needed.
    """
    from kvwire.offline import check_profile, read_manifest

    found = check_profile(read_manifest(manifest), level)
    if as_json:
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
