"""``kvwire plan``: what a load would do, why, and what else there is. Of blobs, nothing but headers is read."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import click

from kvwire.cli.failures import leave
from kvwire.cli.options import DEVICE, DTYPE, FLOOR, JSON, MAX_KL, REPAIR, StoreOptions, repair_of, store_options, takes
from kvwire.cli.plan_inputs import PlanOptions, Sources
from kvwire.cli.plan_printing import print_plan
from kvwire.cli.say import say
from kvwire.errors import ArgumentError, DeadlineError

if TYPE_CHECKING:
    from kvwire.controller import Goal, Objective

_MANY = 16  # documents


@click.command("plan")
@click.option("--docs", multiple=True, help="Ids of documents of the store, or .kvw files, in the prompt's order.")
@click.argument("more_docs", nargs=-1)
@click.option("--context", metavar="TOKENS", help="Instead of --docs: a prompt of so many tokens, such as 32k.")
@click.option(
    "--documents", default=1, show_default=True, type=click.IntRange(1, 128), help="Of which --context is made."
)
@click.option("--model", envvar="KVWIRE_MODEL", help="Folder of the model, whose costs are remembered or measured.")
@takes(DEVICE)
@takes(DTYPE)
@click.option("--machine", help="Instead of --model: a machine by name, such as h100, 4xh100 or cpu; needs --shape.")
@click.option("--shape", help="The model's shape by name, such as llama-3.1-8b; needs --machine.")
@click.option("--estimates", metavar="FILE", help="Instead of --model: what kvwire plan --json printed.")
@click.option("--workers", type=click.Choice(["1", "2"]), help="2: decoding and recomputing run side by side.")
@click.option("--config", default="", metavar="PREFIX", help="Without --model: configuration, as in kvwire store.")
@click.option("--link", help="1gbit or 1gbit,2ms; without it, what is remembered of the link to the store.")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), help="Seconds to the first token.")
@click.option(
    "--objective",
    type=click.Choice(["earliest", "quality", "cheapest"]),
    help="By default the best quality within the deadline, without one the earliest first token.",
)
@click.option("--exact", is_flag=True, help="Lossless levels alone, and texts where there is none; as ask has it.")
@takes(MAX_KL)
@takes(FLOOR)
@click.option(
    "--question-tokens", default=32, show_default=True, type=click.IntRange(1, 1 << 20), help="Length of the question."
)
@takes(REPAIR)
@click.option(
    "--price",
    metavar="PRICES",
    help="Also in money, such as gpu_hour=1.79,gb_month=0.023,egress=0.09.",
)
@click.option("--compare/--no-compare", default=True, help="Also work out alternatives and break-even points.")
@store_options
@takes(JSON)
def plan(*, place: StoreOptions, **given: Any) -> None:  # noqa: ANN401 - click's values
    """Tell what a load would do, why, when its first token would come, and what else there is.

    Documents: --docs A B C of a store, .kvw files, or made up ones of --context tokens with sizes as measured. Costs:
    of --model's engine, of --machine and --shape, or of --estimates. Exit code 6 where the deadline would be missed.
    """
    from kvwire.controller.repair import unmeasured
    from kvwire.whatif.plan import plan_load
    from kvwire.whatif.price import Prices, price_plan

    options = PlanOptions(**given)
    options.check(store_named=place.store is not None)
    prices = None if options.price is None else Prices.parse(options.price)
    without = place.store is None and not options.needs_store
    with nullcontext() if without else closing(place.open_lasting(exists=True)) as store:
        sources = Sources(options, place, store)
        prompt, estimates, settings = sources.prompt(), sources.estimates(), sources.settings()
    if sys.stderr.isatty() and len(prompt.inputs) > _MANY:
        say(f"planning {len(prompt.inputs)} documents takes some seconds; --no-compare is faster", err=True)
    made = plan_load(
        prompt.inputs,
        estimates,
        _goal(options),
        settings=settings,
        query_tokens=options.question_tokens,
        details=prompt.details,
        compare=options.compare,
        repair=unmeasured(repair_of(options.repair)),
    )
    priced = None if prices is None else price_plan(made, prices, prompt.stored_bytes, prompt.raw_bytes)
    error, ttft_s = None, made.prediction.ttft_s
    if not made.prediction.in_time:
        error = DeadlineError(
            f"the first token would come after {ttft_s:.3f} s, the deadline is {options.deadline:g} s"
        )
    print_plan(prompt, made, estimates, settings, as_json=options.as_json, error=error, priced=priced)
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
