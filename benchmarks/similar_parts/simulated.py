"""First tokens of prompts of 4,096 tokens that are made of one donor, simulated: an 8B model's shape on an H100.

The controller fetches the donor's chunks as it fetches any; holes, repair and the prompt's last tokens are computed
behind them, each in a pass of its own. *Auto*: donors where they save a quarter by plan, else text; of such prompts a
loader searches for the first eight (*first*), then for one in 16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvwire.controller import MAX_KL, Goal
from kvwire.controller.policies import Adaptive, TextOnly
from kvwire.controller.simulator import Scenario, constant, costs, machine_named, model_named, simulate, variants_for
from kvwire.reuse import EditScript, Span
from kvwire.runtime.donor_search import TRIED_AGAIN
from kvwire.runtime.prompt_request import LAST_TOKENS
from kvwire.runtime.similar import LEAST_GAIN, ReuseCosts, repaired_rows, search_can_pay

TOKENS, CHUNK, SHARE = 4096, 256, 0.15
RUN = 4
"""Tokens of a hole, such as a field of a form has."""
GBIT_S, RTT_S = (1, 10), (0.002, 0.02)
DIFFER = (0.02, 0.05, 0.1, 0.2, 0.5, 0.75)
SEARCHED = 3
"""Requests one after the other of a search whose donors do not pay: two rounds of features, texts."""


def edit_script(differ: float) -> EditScript:
    """Fields all over a form; from half on, one run is shared, and the rest is another text."""
    tokens = TOKENS - LAST_TOKENS
    if differ >= 0.5:
        kept = round((1 - differ) * TOKENS)
        return EditScript(tokens, (Span(tokens - kept, tokens - kept, kept),))
    step = round(RUN / differ)
    starts = range(0, tokens, step)
    return EditScript(tokens, tuple(Span(at, at, min(step - RUN, tokens - at)) for at in starts))


def rows() -> list[dict[str, Any]]:
    """Seconds of text, of donors in any case, and of what loads do, by link and share of tokens that differ."""
    model, machine, out = model_named("llama-3.1-8b"), machine_named("h100"), list[dict[str, Any]]()
    (((whole,),), cost) = variants_for(model, [TOKENS - LAST_TOKENS], max_kl=MAX_KL), costs(model, machine)
    for gbit, rtt_s in ((gbit, rtt_s) for gbit in GBIT_S for rtt_s in RTT_S):
        rate = constant(gbit * 125e6)
        reuse = ReuseCosts(replace(cost, decode=cost.decode.shared(64, 1)), gbit * 125e6, rtt_s)
        base = Scenario(
            model=model, machine=machine, documents=((whole,),), rate=rate, goal=Goal(), rtt_s=rtt_s,
            query_tokens=LAST_TOKENS,
        )  # fmt: skip
        text_s = simulate(base, TextOnly())[0].ttft_s
        for differ in DIFFER:
            script = edit_script(differ)
            touched = {at // CHUNK for span in script.spans for at in range(span.at, span.at + span.tokens)}
            part = replace(
                whole,
                **{
                    name: tuple(getattr(whole, name)[chunk] for chunk in sorted(touched))
                    for name in ("tokens", "fetch_bytes", "errors")
                },
            )
            repaired = repaired_rows(script, SHARE)
            computed_s = (
                reuse.rows_s(script.computed, TOKENS) + reuse.rows_s(repaired, TOKENS)
                + reuse.text_s(LAST_TOKENS, script.tokens) * 2
            )  # fmt: skip
            loaded = simulate(replace(base, documents=((part,),), query_tokens=0), Adaptive())[0]
            size = sum(row[whole.floor] for row in part.fetch_bytes)
            plan_s = reuse.load_s(size, script.reused) + reuse.closing_s(script.tokens) + computed_s
            donors_s = (SEARCHED + 1) * rtt_s + loaded.ttft_s + computed_s
            known = size / script.reused  # from the search before
            searches = search_can_pay(reuse, TOKENS, LAST_TOKENS, SHARE, known)
            pays = searches and plan_s <= (1 - LEAST_GAIN) * text_s
            auto_s = donors_s if pays else text_s + SEARCHED * rtt_s * searches / TRIED_AGAIN
            first_s = (
                donors_s if pays else text_s + SEARCHED * rtt_s * search_can_pay(reuse, TOKENS, LAST_TOKENS, SHARE)
            )
            out.append({
                "gbit": gbit, "rtt_s": rtt_s, "differ": script.computed / script.tokens, "repaired": repaired,
                "text_s": text_s, "donors_s": donors_s, "planned_s": plan_s, "searches": searches,
                "auto": "donors" if pays else "text", "auto_of_text": auto_s / text_s,
                "first_of_text": first_s / text_s, "donors_of_text": donors_s / text_s,
            })  # fmt: skip
            print({name: round(each, 4) if isinstance(each, float) else each for name, each in out[-1].items()})
    return out
