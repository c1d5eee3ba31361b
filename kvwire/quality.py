"""How much an answer differs from the one that exact caches give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.reuse import link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.types import KVCache


def mean_kl(exact: Tensor, other: Tensor) -> float:
    """Mean KL divergence of next-token distributions in nats, from logits ``[tokens, vocabulary]``."""
    p, q = exact.float().log_softmax(-1), other.float().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def greedy_agreement(exact: Tensor, other: Tensor) -> float:
    """Share of positions at which both would choose the same token."""
    return float((exact.argmax(-1) == other.argmax(-1)).float().mean())


@dataclass(frozen=True, eq=False)
class Reference:
    """What exact caches, linked in the same way, make of a question and of the answer that they give.

    tokens: the question and the exact caches' greedy answer, fed to both sides. logits: ``[tokens, vocabulary]``.
    linking_kl: of linked exact caches against one full prefill of the prompt; not the codec's doing.
    """

    start: int
    tokens: tuple[int, ...]
    logits: Tensor
    linking_kl: float

    @classmethod
    def of(
        cls, engine: TransformersEngine, documents: Sequence[Sequence[int]], question: Sequence[int], answer_tokens: int
    ) -> Reference:
        """Prefill the documents one by one, link them, and let the model answer."""
        linked = link([engine.prefill([document])[0] for document in documents])
        start = linked.tokens
        past = engine.past_key_values(linked)
        first = int(engine.forward(past, question, start, logits=1)[-1].argmax())
        room = min(answer_tokens, engine.window - start - len(question))
        answer = engine.generate(past, first, start + len(question), room)
        tokens = (*question, *answer[:-1])
        logits = engine.forward(engine.past_key_values(linked), tokens, start)
        whole = [token for document in documents for token in document]
        full = engine.forward(None, [*whole, *tokens], 0, logits=len(tokens))
        return cls(start, tokens, logits, mean_kl(full, logits))

    def compare(self, engine: TransformersEngine, cache: KVCache) -> tuple[float, float]:
        """Mean KL divergence and greedy agreement of another cache of the same prompt."""
        logits = engine.forward(engine.past_key_values(cache), self.tokens, self.start)
        return mean_kl(self.logits, logits), greedy_agreement(self.logits, logits)
