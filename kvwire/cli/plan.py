"""``kvwire plan``: what a load would do, why, and what else there is. Of blobs, nothing but headers is read."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from kvwire.cli.options import command
from kvwire.cli.plan_inputs import PlanOptions, Sources
from kvwire.cli.plan_printing import print_plan
from kvwire.cli.plan_prompt import plan_prompt
from kvwire.cli.say import late_error, leave, say
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.controller import Goal, Objective

_MANY = 16  # documents


@command(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Tell what a load would do, why, when its first token would come, and what else there is.

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
