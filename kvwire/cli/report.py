"""``kvwire report``: what a store holds and what it is good for, as one page of HTML."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvwire._user_file import file_errors
from kvwire.cli import options as opt
from kvwire.cli.options import StoreOptions, command, flag, option
from kvwire.cli.say import progress, say
from kvwire.errors import ArgumentError, CorruptError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.report import ConfigSurvey, FirstTokens, Survey
    from kvwire.report.surveying import LevelTotal
    from kvwire.store import Store

_HINT = (
    "Nobody said what computes. Give --machine and --shape (such as h100 and llama-3.1-8b), --model with the model's "
    "folder, or --estimates with what kvwire plan --json printed."
)
_RTT = "2ms"
_QUESTION = 32


@dataclass(frozen=True)
class _ReportOptions:
    """What ``kvwire report`` is given."""

    out: str = option("Where the page goes.", default="report.html", metavar="FILE")
    all_tenants: bool = flag("Every tenant of the store, not only --tenant.")
    sample: int = option("Headers that are read.", default=16, type=click.IntRange(0, 1024))
    model: str | None = option("Folder of the model, for the time to the first token.", envvar="KVWIRE_MODEL")
    device: str = opt.DEVICE
    dtype: str = opt.DTYPE
    machine: str | None = option("Instead of --model: a machine by name, such as h100; needs --shape.")
    shape: str | None = option("The model's shape by name, such as llama-3.1-8b; needs --machine.")
    estimates: str | None = option("Instead of --model: what kvwire plan --json printed.", metavar="FILE")
    place: StoreOptions = opt.STORE
    as_json: bool = opt.JSON

    @property
    def costs(self) -> dict[str, Any]:
        """What tells costs, as ``PlanOptions`` takes it."""
        return {name: getattr(self, name) for name in ("model", "device", "dtype", "machine", "shape", "estimates")}


@command(_ReportOptions)
def report(options: _ReportOptions) -> None:
    """Write a page of what a store holds: documents, bytes by level, rate and distortion, ages, what is damaged.

    With the costs of a model or a machine also when first tokens come. Nothing is changed. Of blobs, no more than
    sampled headers is read. Exit code 4 where something is damaged; the page is written all the same.
    """
    from kvwire.report import survey

    _check_pictures()
    out, place = options.out, options.place
    wanted = options.model or options.machine or options.shape or options.estimates
    if bool(options.machine) != bool(options.shape):
        raise ArgumentError("--machine and --shape go together: a machine's costs depend on the model's shape")
    page = Path(out)
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise NotFoundError(f"{out} cannot be written: name a file in a folder that is there")
    with place.opened() as store:
        with progress("looking at", "obj") as tell:
            tenant = None if options.all_tenants else place.catalog(store).tenant
            found = survey(store, tenant_hash=tenant, keyring=place.keyring(), sample=options.sample, on_progress=tell)
        first = _first_tokens(found, store, options) if wanted else None
    _write(page, found, first)
    if options.as_json:
        say(json.dumps(_as_data(found, first) | {"page": out}))
    else:
        documents = sum(each.documents for each in found.configs)
        say(f"{out}: {documents:,} documents in {len(found.configs)} model configurations, {found.seconds:.1f} s")
    if not all(each.is_sound for each in found.configs):
        raise CorruptError(f"something in {found.store} is damaged or missing: {out} tells what, and what to do")


def _first_tokens(found: Survey, store: Store, asked: _ReportOptions) -> FirstTokens:
    """Of the sampled document of middle length that the costs are for."""
    from kvwire.cli.plan_inputs import PlanOptions, Sources
    from kvwire.controller import Goal
    from kvwire.report import first_tokens

    for each in found.configs:
        if each.sample and each.tenant == asked.place.catalog(store).tenant:
            name, config = list(each.sample)[len(each.sample) // 2], each.config
            break
    else:
        msg = f"there is no document with a blob in {found.store} to tell first tokens of: leave the costs out"
        raise NotFoundError(msg)
    given = {"link": f"1gbit,{_RTT}", "question_tokens": _QUESTION, "place": asked.place} | asked.costs
    prompt, situation = Sources(PlanOptions.of_document(name, config, **given), store).scenario(Goal())
    engine = " with ".join(filter(None, (asked.machine, asked.shape))) or asked.model or asked.estimates or ""
    with progress("simulating", "link") as tell:
        return first_tokens(prompt.names, situation, engine, on_progress=tell)


def _check_pictures() -> None:
    try:
        import kvwire.report.figures  # noqa: F401 - only whether it can be
    except ImportError as error:
        raise NotFoundError("a report has pictures, which need matplotlib: pip install 'kvwire[demo]'") from error


def _write(page: Path, found: Survey, first: FirstTokens | None) -> None:
    from kvwire.report import write_page

    with file_errors(f"{page} cannot be written", "choose another --out"):
        page.write_text(write_page(found, first, _HINT), encoding="utf-8")


def _as_data(found: Survey, first: FirstTokens | None) -> dict[str, Any]:
    configs = [_config(each) for each in found.configs]
    about: dict[str, Any] = {"store": found.store, "seconds": found.seconds, "configs": configs}
    if first is not None:
        about["first_tokens"] = {name: value for name, value in asdict(first).items() if name != "query_tokens"}
    return about


def _config(each: ConfigSurvey) -> dict[str, Any]:
    names = ("tenant", "config", "model_id", "documents", "texts_only", "tokens", "bytes")
    totals = {"levels": _totals(each.levels), "objects": _totals(each.objects)}
    kinds = ("damaged", "missing", "unread", "unnamed", "unknown")
    wrong = {kind: asdict(getattr(each, kind)) for kind in kinds}
    about = {name.removesuffix("_id"): getattr(each, name) for name in names}
    return about | totals | {"profiles": dict(each.profiles), "wrong": wrong}


def _totals(totals: Mapping[str, LevelTotal]) -> dict[str, dict[str, int]]:
    return {
        name: {"number": each.documents, "tokens": each.tokens, "bytes": each.bytes} for name, each in totals.items()
    }
