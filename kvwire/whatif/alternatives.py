"""Alternatives for the same prompt: other policies, single levels, uncompressed caches, other objectives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire import controller as ctl
from kvwire.controller.policies import Adaptive, CacheGen, Fixed, Raw, TextOnly
from kvwire.whatif.situation import Details, known_link

if TYPE_CHECKING:
    from kvwire.whatif.situation import PlanScenario, Prediction


def predict_alternatives(situation: PlanScenario) -> list[Prediction]:
    """Predict all alternatives."""
    names = situation.details.level_names
    found = [situation.predict("text only", TextOnly())]
    bare = situation.without_floors()
    for level in situation.levels:
        name = f"level {level}" + (f" ({names[level]})" if level < len(names) else "")
        found.append(bare.predict(name, Fixed(level)))
    if situation.details.raw_token_bytes:
        found.append(_raw(situation).predict("raw cache", Raw()))
    found.append(situation.predict("CacheGen's rule", CacheGen()))
    if situation.goal.deadline_s is not None:
        objectives: tuple[ctl.Objective, ...] = ("earliest", "quality", "cheapest")
        for objective in objectives:
            if objective != situation.goal.objective:
                other = replace(situation, goal=replace(situation.goal, objective=objective))
                found.append(other.predict(f"objective {objective}", Adaptive()))
    return found


def _raw(situation: PlanScenario) -> PlanScenario:
    """The same documents as uncompressed caches, counted with the error of recomputed ones."""
    details, documents = situation.details, [variants[0] for variants in situation.documents]
    sizes = [tuple((tokens * details.raw_token_bytes,) for tokens in each.tokens) for each in documents]
    errors = [tuple((each.error(chunk, None),) for chunk in range(len(each.tokens))) for each in documents]
    raw = tuple(
        (ctl.DocumentPlanInput(each.tokens, size, each.has_text, error),)
        for each, size, error in zip(documents, sizes, errors, strict=True)
    )
    costs = replace(situation.estimates.costs(), decode=details.raw_decode)
    estimates = known_link(costs, situation.bandwidth, situation.estimates.ttfb.value)
    goal = replace(situation.goal, floor=0, ceiling=None)
    only = Details(level_kl=tuple(each[-1:] for each in details.level_kl))
    return replace(situation, documents=raw, estimates=estimates, goal=goal, details=only)
