"""``kvwire plan --prompt``: what of the store a prompt would be made of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvwire.cli.ask import prompt_tokens
from kvwire.cli.inputs import open_engine, read_link
from kvwire.cli.options import repair_of
from kvwire.cli.say import error_as_data, late_error, leave, say
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.cli.plan_inputs import PlanOptions
    from kvwire.runtime.similar import Search


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
    if options.as_json:
        say(json.dumps(_described(search) | error_as_data(error)))
    else:
        say(*_lines(search))
    if error:
        leave(error)


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
