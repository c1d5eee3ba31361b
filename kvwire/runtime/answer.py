"""What a load gives: the first token, how it came about, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.reuse import LinkedPrompt, Repaired
    from kvwire.types import Decision


@dataclass(frozen=True)
class Timing:
    """Where the time to the first token went, in seconds.

    The parts overlap, so they add up to more than ``ttft_s``.

    Attributes:
        ttft_s: From the call to the first token, catalog lookups included.
        fetch_s: Until the last byte that was used arrived.
        decode_s: Compute spent on decoding chunks, in part while fetching.
        recompute_s: Compute spent on recomputing chunks, in part while fetching.
        link_s: Making the engine's cache, and adding the mean shift of links.
        query_s: The question's forward pass.
        repair_s: Choosing rows of the prompt and computing them anew, in part while fetching.
        look_s: Running the question on coarse levels while finer ones were fetched, to see which of these matter.
        front_s: Computing what the layout has before the question: system text, markers and link tokens.
    """

    ttft_s: float
    fetch_s: float
    decode_s: float
    recompute_s: float
    link_s: float
    query_s: float
    repair_s: float = 0.0
    look_s: float = 0.0
    front_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Answer:
    """The first token and how it came about.

    Attributes:
        first_token: Its id.
        logits: Of the question's last token, float32 ``[vocabulary]``.
        tokens: Token ids of the answer.
        text: The answer in words.
        prompt: The linked cache of all documents. Its tensors are views of memory that also holds what was computed
            behind it, of question and answer; clone them before they are saved or kept.
        decisions: What the controller decided for the chunks.
        reason: Why it decided so, in words.
        timing: Where the time went.
        bytes: Fetched, headers included.
        misses: What went wrong on the way and was healed by recomputing, or with a lower level, in words.
        predicted_s: The time to first token that the first complete plan expected, counted from the asking; None where
            there was none.
        error: Mean over the documents' tokens of the measured errors of the levels in use; a recomputed chunk counts
            with its blob's finest.
        repair: Which rows of the prompt were computed anew, and what that took; None where none were.
        front: Tokens from the prompt's beginning on that saw all that stands before them before anything was repaired:
            the first document, and what was recomputed behind it where links are repaired; 0 where a layout computes
            tokens before the question.
        link_warning: Why documents that do not see each other make this answer doubtful, as far as the model was
            measured (``kvwire check-model``); empty where nothing says so.
        computed: How many tokens the layout had computed before the question: system text, markers and link tokens.
        shifted: To how many tokens of the prompt the learnt mean shift of linked documents was added, before any row
            was computed anew.
    """

    first_token: int
    logits: Tensor
    tokens: tuple[int, ...]
    text: str
    prompt: LinkedPrompt
    decisions: tuple[Decision, ...]
    reason: str
    timing: Timing
    bytes: int
    misses: tuple[str, ...]
    predicted_s: float | None = None
    error: float = 0.0
    repair: Repaired | None = None
    link_warning: str = ""
    front: int = 0
    computed: int = 0
    shifted: int = 0
