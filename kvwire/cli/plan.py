"""``kvwire plan``: what a load would do, why, and alternatives. Of blobs, nothing but headers is read."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kvwire.cli.ask import prompt_tokens
from kvwire.cli.inputs import open_engine, read_link
from kvwire.cli.options import command, repair_of
from kvwire.cli.plan_inputs import PlanOptions, Sources
from kvwire.cli.plan_printing import print_plan
from kvwire.cli.say import finish, late_error, leave, say
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.controller import Goal, Objective
    from kvwire.runtime.similar import Search

_MANY = 16  # documents


@command(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Tell what a load would do, why, when its first token would come, and alternatives.

    Documents: --docs A B C of a store, .kvw files, or made up ones of --context tokens with sizes as measured. Costs:
    of --model's engine, of --machine and --shape, or of --estimates. With --prompt: which similar prompts it would be
    made of. Exit code 6 where the deadline would be missed.
    """
    from kvwire.whatif.plan import plan_load
    from kvwire.whatif.price import Prices, price_plan
    from kvwire.whatif.tiers import parse_tiers

    if options.prompt:
        plan_prompt(options)
        return
    options.check()
    prices = None if options.price is None else Prices.parse(options.price)
    tiers = () if options.tiers is None else parse_tiers(options.tiers)
    without = options.place.store is None and not options.needs_store
    with nullcontext() if without else options.place.opened() as store:
        prompt, scenario = Sources(options, store).scenario(_goal(options))
    if sys.stderr.isatty() and len(prompt.inputs) > _MANY:
        say(f"planning {len(prompt.inputs)} documents takes some seconds; --no-compare is faster", err=True)
    made = plan_load(scenario, compare=options.compare, tiers=tiers, stored_bytes=prompt.stored_bytes)
    priced = None if prices is None else price_plan(made, prices, prompt.stored_bytes, prompt.raw_bytes)
    error = late_error(made.prediction.ttft_s, options.deadline)
    print_plan(prompt, made, as_json=options.as_json, error=error, priced=priced)
    if error:
        leave(error)


def _goal(options: PlanOptions) -> Goal:
    from kvwire.controller import EXACT, Goal

    if options.exact and (options.context is not None or options.floor is not None):
        msg = "--exact is about lossless levels of documents that are named: leave out --context and --floor"
        raise ArgumentError(msg)
    usual: Objective = "earliest" if options.deadline is None else "quality"
    return Goal(
        objective=options.objective or usual,
        deadline_s=options.deadline,
        floor=EXACT if options.exact else options.floor or 0,
    )


def plan_prompt(options: PlanOptions) -> None:
    """Search donors of a prompt, and tell what editing them takes, why others are refused, and if it would be late."""
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.loader import Loader
    from kvwire.runtime.settings import LoadSettings

    if options.names or options.context or options.is_modelled or not (options.model and options.place.store):
        raise ArgumentError("--prompt needs --model and --store, and goes without documents, --context and other costs")
    if options.price or options.tiers or options.exact:
        msg = "--price, --tiers and --exact are about documents that are named: leave them out with --prompt"
        raise ArgumentError(msg)
    engine = open_engine(options.model, options.device, options.dtype)
    settings = LoadSettings(max_kl=options.max_kl, quality_floor=options.floor, repair=repair_of(options.repair))
    with options.place.opened() as store:
        corpus = Corpus(engine, store, **options.place.whose())
        with Loader(engine, corpus, settings=settings) as loader:
            link = read_link(options.link) if options.link else None
            search = loader.plan_prompt(prompt_tokens(engine, options.prompt), link=link)
    error = late_error(search.plan.seconds if search.plan else search.rival_s, options.deadline)
    finish(_described(search), _lines(search), error, as_json=options.as_json)


def _described(search: Search) -> dict[str, Any]:
    best = search.best
    plan = best and {
        "donors": [donor.document.document_id for donor in best.donors], "tokens": best.script.tokens,
        "reused": best.script.reused, "spans": [list(span) for span in best.script.spans],
        "holes": [list(hole) for hole in best.script.holes], "repaired": best.repaired, "selector": best.selector,
        "bytes": best.size, "seconds": best.seconds, "expected_kl": best.error,
    }  # fmt: skip
    considered = [
        {"document": each.document, "tokens": each.tokens, "spans": each.spans, "refused": each.refused}
        for each in search.considered
    ]
    return {"pays": search.plan is not None, "plan": plan, "without_s": search.rival_s, "considered": considered}


def _lines(search: Search) -> Iterator[str]:
    yield f"without donors: {search.rival_s:.3g} s"
    if (best := search.best) is not None:
        script = best.script
        error = "never measured (kvwire check-model --edits)" if best.error is None else f"KL {best.error:.2g}"
        verdict = "pays" if search.plan else "does not pay"
        yield (
            f"edited: {best.seconds:.3g} s, which {verdict}: {script.reused} of {script.tokens} tokens in "
            f"{len(script.spans)} spans, {best.size:,} bytes; {script.computed} tokens in {len(script.holes)} holes, "
            f"and {best.repaired} rows anew by {best.selector}; expected error {error}"
        )
    for each in search.considered:
        why = f"refused: {each.refused}" if each.refused else "used"
        yield f"{each.document}: {each.tokens} tokens in {each.spans} spans; {why}"
    if not search.considered:
        yield "no document is like the prompt: encode with --index donors, or ask with --save --reuse auto"
