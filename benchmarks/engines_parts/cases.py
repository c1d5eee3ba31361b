"""Every way to a first token that the benchmark times."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engines_parts.places import QUESTION
from engines_parts.serving import Answer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from engines_parts.places import Place, Prompt
    from engines_parts.serving import Serving
    from engines_parts.shaped_relay import ShapedRelay
    from kvwire.vllm import Choice


@dataclass(frozen=True)
class Case:
    """One way to a first token. prepare: untimed; relay: what its bytes pass, where they cross a link."""

    prepare: Callable[[Prompt], object]
    ask: Callable[[Prompt, bool], Answer]
    relay: ShapedRelay | None = None
    least_cached: int = 0


def all_cases(place: Place, args: argparse.Namespace) -> dict[str, Case]:
    """Every case by name; those with a relay are measured over each link."""
    from kvwire.vllm import Choice

    plain, kvwire_relay = place.plain, place.relays[0]
    fresh = random.Random(args.seed)

    def alone(serving: Serving) -> Case:
        """The question without documents: what a request costs at least."""
        salted = lambda prompt: {"prompt": prompt.question, "cache_salt": str(fresh.random())}  # noqa: E731
        return Case(lambda _: None, lambda prompt, every: serving.ask(salted(prompt), all_tokens=every))

    def forgetful(serving: Serving) -> Callable[[Prompt], object]:
        return lambda _: serving.forget()

    cases = {
        "question alone": alone(plain),
        "question alone, kvwire's connector": alone(place.kvwire),
        "prefill": Case(forgetful(plain), _asking(plain)),
        "prefill, kvwire's connector": Case(forgetful(place.kvwire), _asking(place.kvwire)),
        "vLLM's own prefix hit": Case(
            lambda prompt: plain.ask({"prompt": prompt.tokens}), _asking(plain), least_cached=1
        ),
        "raw pages in files": Case(forgetful(place.example), _asking(place.example), least_cached=1),
    }
    if place.lmcache and place.server:
        theirs, server = place.lmcache, place.server

        def forget(_: Prompt) -> None:
            theirs.forget()
            server.forget()

        cases["LMCache, raw chunks"] = Case(forget, _asking(theirs), place.relays[1], least_cached=1)
    choices = {
        f"kvwire, documents at level {args.level}": Choice(("",), level=args.level),
        f"kvwire, documents within {args.deadline:g} s": Choice(("",), deadline_s=args.deadline),
        f"kvwire, prefix at level {args.level}": Choice(level=args.level, prefix=True),
    }
    for name, choice in choices.items():
        cases[name] = Case(forgetful(place.kvwire), _linked(place, choice), kvwire_relay)
    cases["kvwire's load alone, outside vLLM"] = Case(
        lambda _: None, lambda prompt, _: load_alone(place, prompt, args.level), kvwire_relay
    )
    return cases


def _asking(serving: Serving) -> Callable[[Prompt, bool], Answer]:
    return lambda prompt, every: serving.ask({"prompt": prompt.tokens}, all_tokens=every)


def _linked(place: Place, choice: Choice) -> Callable[[Prompt, bool], Answer]:
    """A prompt through kvwire's connector."""
    from kvwire.vllm import request_body

    def ask(prompt: Prompt, every: bool) -> Answer:  # noqa: FBT001
        mine = choice if choice.prefix else replace(choice, documents=prompt.names)
        body = request_body(place.corpus, mine, prompt.tokens if choice.prefix else prompt.question)
        answer = place.kvwire.ask(body, all_tokens=every)
        assert "refused" not in answer.told, answer.told
        assert not answer.told.get("trouble"), answer.told
        return answer

    return ask


def load_alone(place: Place, prompt: Prompt, level: int) -> Answer:
    """What the connector does for a prompt, without vLLM."""
    from kvwire.controller import Goal

    goal = Goal(objective="earliest", floor=level, ceiling=level)
    started = time.perf_counter()
    loaded = place.loader.load(prompt.names, prompt.texts, goal, level)
    seconds = time.perf_counter() - started
    assert loaded.tokens == len(prompt.tokens) - QUESTION, loaded.troubles
    return Answer(seconds, loaded.tokens, {}, {})
