"""Repairing a load's prompt: between its last chunk and its question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import MismatchError
from kvwire.reuse import RepairInput, repair_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkedPrompt, Repaired
    from kvwire.runtime.links import LinkPlan


class Repairer:
    """Repairs prompts of one engine, and remembers where that cannot be done.

    Attributes:
        trouble: Why prompts are not repaired; empty while they can be.
    """

    def __init__(self, engine: Engine) -> None:
        """Keep the engine.

        Args:
            engine: Runs the model.
        """
        self._engine = engine
        self.trouble = ""

    def run(
        self, plan: LinkPlan, prompt: LinkedPrompt, texts: Sequence[Sequence[int] | None], question: Sequence[int],
        share: float,
    ) -> tuple[Repaired | None, str]:  # fmt: skip
        """Compute a share of a prompt's rows anew, in its cache.

        Args:
            plan: What is done about links.
            prompt: All of it valid.
            texts: Token ids of each document; None where they are not known.
            question: Token ids.
            share: 0 to 1.

        Returns:
            What was done, and why nothing was, where that is so though a share was wanted.

        Raises:
            MismatchError: The share was asked for and the engine cannot.
            ArgumentError: The selector lacks something.
        """
        if share <= 0 or len(prompt.tokens) == 1:
            return None, ""
        known = [text for text in texts if text is not None]
        if len(known) < len(prompt.tokens):
            return self._refused(plan, "the text of a document is not known")
        ids = tuple(token for text in known for token in text)
        given = RepairInput(self._engine, prompt.cache, ids, prompt.tokens, tuple(question))
        try:
            return repair_prompt(given, plan.selector, share), ""
        except MismatchError as error:
            self.trouble = str(error)
            return self._refused(plan, str(error))

    def _refused(self, plan: LinkPlan, why: str) -> tuple[None, str]:
        words = f"links were not repaired: {why}"
        if plan.is_wanted:
            raise MismatchError(words)
        return None, words
