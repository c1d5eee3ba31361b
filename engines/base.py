"""What kvwire needs of an engine, and nothing else.

An engine runs one model. It inherits from ``Engine``, which makes of the few methods that every engine has its own way
for all that follows from them, and says of the rest what doing without costs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch

from kvwire.errors import ArgumentError, MismatchError, NotFoundError
from kvwire.types import KVCache

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvwire.codec import Statistics
    from kvwire.reuse import AttentionSummary, Narrowing, SoftTokens
    from kvwire.types import CacheMeta, Chat, RenderedChat

Place: TypeAlias = Literal["first", "middle", "last"]
"""Where a piece of text stands in a prompt."""
Trust: TypeAlias = Literal["frame", "document"]
"""Who wrote a piece of text: ``frame``, the caller, who may spell control tokens; ``document``, anybody else."""


class PassStoppedError(Exception):
    """A forward pass ended early because it was asked to, see ``Engine.stoppable``."""


class Engine(Protocol):
    """One model: documents to caches, and caches and a question to the first token.

    All methods are called from one thread at a time for each engine, but for ``synchronize``, which a second thread
    that decodes calls while the first computes, and for ``tokenize``, ``render_chat`` and ``check_chat``, which threads
    that read texts call meanwhile. Properties may be read at any time. To be implemented: ``meta``, ``device``,
    ``dtype``, ``window``, ``vocabulary_size``, ``prefill``, ``extend``, ``past_key_values`` and ``forward``.
    """

    @property
    def meta(self) -> CacheMeta:
        """What the caches of this model say of themselves: model, tokenizer, layers and rotary regimes."""
        ...

    @property
    def model_config_digest(self) -> str:
        """SHA-256 of the model's own configuration file, for its record in a store; empty where there is none."""
        return ""

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers that the model computes with, and of its caches."""
        ...

    @property
    def window(self) -> int:
        """Most tokens that a prompt may hold."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are 0 to this, exclusive."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return frozenset()

    @property
    def device_name(self) -> str:
        """The hardware, for what is remembered of its speed; empty for the processor."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    @property
    def can_recompute(self) -> bool:
        """Whether chunks can be computed here; False: this stands in for a model that runs elsewhere."""
        return True

    @property
    def can_repair(self) -> bool:
        """Whether ``update_rows`` computes rows inside a prompt."""
        return False

    @property
    def can_look(self) -> bool:
        """Whether ``look`` shows the model's attention."""
        return False

    @property
    def can_join(self) -> bool:
        """Whether ``extend_together`` may extend several caches in one pass, if ``check_together`` agrees."""
        return False

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be read and written; without it, callers pass token ids."""
        return False

    @property
    def opening_tokens(self) -> tuple[int, ...]:
        """What the tokenizer puts in front of a whole text, such as BOS; ``tokenize`` leaves it out."""
        return ()

    def tokenize(self, text: str, *, place: Place = "middle", trust: Trust = "document") -> list[int]:
        """Token ids of a piece of a prompt, without special tokens around it.

        Args:
            text: The piece.
            place: Where it stands in the prompt; documents may stand anywhere, so they are read for its middle.
            trust: ``frame``: the caller's own text, in which control tokens may be spelt; ``document``: all is text.

        Raises:
            NotFoundError: The engine has no tokenizer.
        """
        raise _no_tokenizer((text, place, trust))

    def detokenize(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """The text of token ids.

        Args:
            token_ids: Of the vocabulary.
            special: Spell special tokens out; False, for answers: leave them out.

        Raises:
            NotFoundError: The engine has no tokenizer.
        """
        raise _no_tokenizer((token_ids, special))

    def render_chat(self, chat: Chat, question: str) -> RenderedChat:
        """Render a chat by the model's own template. An engine may lack it; without it, ``Loader.ask`` takes no chats.

        Args:
            chat: What stands around the documents.
            question: The user's words behind them.

        Returns:
            Token ids before and behind the documents, and those that end the answer.

        Raises:
            NotFoundError: The model has no chat template.
            ArgumentError: The template fails on this chat, or does not leave the documents' text as it is.
        """
        del chat, question
        msg = "this engine renders no chats; open the model with transformers, or pass token ids"
        raise NotFoundError(msg)

    def check_chat(self, chat: Chat, question: str, documents: Sequence[Sequence[int]], rendered: RenderedChat) -> str:
        """Where the prompt's tokens are not those that the template gives the same turns at once.

        Args:
            chat: What stands around the documents.
            question: The user's words behind them.
            documents: Token ids of each.
            rendered: What ``render_chat`` made of it.

        Returns:
            In words; empty where all are the same.
        """
        del chat, question, documents, rendered
        return ""

    def render_turn(self, chat: Chat, question: str) -> RenderedChat:
        """What the chat's template puts behind an answer, up to the next one. An engine may lack it.

        Args:
            chat: Of the conversation; its turns and system text are known already.
            question: The user's words.

        Returns:
            All of it in ``tail``.

        Raises:
            NotFoundError: The model has no chat template.
            ArgumentError: The template fails on this chat.
        """
        return self.render_chat(chat, question)

    def check_turns(self, chat: Chat, token_ids: Sequence[int]) -> str:
        """Where a conversation's tokens are not those that its template gives all its turns at once.

        Args:
            chat: Of the conversation.
            token_ids: All of it.

        Returns:
            In words; empty where all are the same.
        """
        del chat, token_ids
        return ""

    @property
    def soft_tokens(self) -> SoftTokens | None:
        """Trained embeddings that token ids beyond the vocabulary, and negative ones, stand for; None without any."""
        return None

    def use_soft_tokens(self, soft: SoftTokens | None) -> None:
        """Let token ids stand for trained embeddings from now on, in every method: k-th is ``soft_token(k)``.

        Without it, documents are not encoded with soft tokens, and prompts have none as link tokens.

        Args:
            soft: The embeddings, in place of earlier ones; None: none any more.

        Raises:
            MismatchError: They are of another model, or the engine takes none.
        """
        if soft is not None:
            msg = "this engine takes no soft tokens; open the model with transformers"
            raise MismatchError(msg)

    def prefill(self, documents: Sequence[Sequence[int]]) -> list[KVCache]:
        """Caches of independent documents.

        Args:
            documents: Token ids of each.

        Returns:
            One cache for each document, in their order, positions on and from 0, with its token ids.

        Raises:
            ArgumentError: A document has no tokens, or more than the window.
        """
        ...

    def prefill_masked(self, token_ids: Sequence[int], visible: Tensor) -> KVCache:
        """The cache of one document whose tokens see less than all before them. An engine may lack it.

        Without it, no document is computed with anchors.

        Args:
            token_ids: The document's.
            visible: Bool ``[tokens, tokens]``: row r sees column c, none behind it.

        Raises:
            ArgumentError: The mask is not of the document's size.
            MismatchError: The engine cannot.
        """
        del token_ids, visible
        msg = "this engine runs documents under no mask of their own; encode without anchors"
        raise MismatchError(msg)

    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Compute tokens on top of the cache before them, as one prefill of both would.

        Args:
            prefix: Positions on, ending where the new tokens begin; what was pruned of it is not seen. None where
                nothing stands before them.
            token_ids: The new tokens.
            offset: Position of the first new token where there is no prefix.

        Returns:
            The cache of the new tokens alone.
        """
        ...

    @property
    def can_stop(self) -> bool:
        """Whether ``stoppable`` can stop a pass. Without it, passes before a deadline are short: one may be slow."""
        return False

    def stoppable(self, stop: threading.Event) -> AbstractContextManager[None]:
        """Have forward passes in this context end soon after an event is set, whichever thread sets it.

        Args:
            stop: The event.

        Returns:
            The context, to be entered by the thread that runs the passes. Out of a pass that it stops comes
            PassStoppedError, and what the pass was computed from is as it was.
        """
        del stop
        return nullcontext()

    def check_together(self) -> None:
        """Refuse where ``extend_together`` does not give what ``extend`` gives; may run the model once to find out.

        Called from the thread of all other methods, before a load. Without it, passes of several loads run one after
        the other, which takes longer where a pass is short against what any pass takes.

        Raises:
            MismatchError: The engine, or its model, extends caches one by one.
        """
        msg = "this engine extends caches one by one"
        raise MismatchError(msg)

    def extend_together(
        self, prefixes: Sequence[KVCache | None], token_ids: Sequence[Sequence[int]], *, offsets: Sequence[int]
    ) -> list[KVCache]:
        """``extend`` for several caches in one forward pass. An engine may lack it, see ``check_together``.

        Args:
            prefixes: What stands before each row's tokens, as for ``extend``; lengths may differ.
            token_ids: The new tokens of each row; lengths may differ.
            offsets: Position of each row's first new token where it has no prefix.

        Returns:
            For each row what ``extend`` returns, to 1e-5 of its largest numbers in float32; they share no memory.

        Raises:
            MismatchError: The engine cannot, or cannot with these caches.
        """
        del prefixes, token_ids, offsets
        self.check_together()
        msg = "this engine extends caches one by one"
        raise MismatchError(msg)

    def past_key_values(self, cache: KVCache) -> Any:  # noqa: ANN401 - the engine's own
        """A cache as ``forward`` takes it: the engine's own type, which grows as it is used.

        Raises:
            MismatchError: The cache is of another model.
        """
        ...

    def own_past(self, cache: KVCache) -> Any:  # noqa: ANN401 - the engine's own
        """``past_key_values`` for ``forward`` and ``generate`` alone, which may know of gaps that no one else does.

        Raises:
            MismatchError: The cache is of another model, or has gaps that the engine cannot leave out.
        """
        return self.past_key_values(cache)

    def growing_past(self, cache: KVCache, room: KVCache) -> Any:  # noqa: ANN401 - the engine's own
        """``own_past`` of a prompt that may have room behind it: what runs on top may be written there.

        An engine without it copies the prompt's cache in the first pass, or wherever else its own pasts do.

        Args:
            cache: A slice of ``room`` from its first token on, which stays as it is.
            room: From ``allocate``, as long as ``cache`` or longer; its rows behind that belong to this past alone
                from now on.

        Returns:
            The past.

        Raises:
            MismatchError: See ``own_past``.
        """
        del room
        return self.own_past(cache)

    def forward(self, past: Any, token_ids: Sequence[int], start: int, *, logits: int = 0) -> Tensor:  # noqa: ANN401
        """Run tokens on top of a cache.

        Args:
            past: From ``past_key_values``; None where nothing stands before. It grows by the tokens.
            token_ids: Tokens at positions ``start``, ``start + 1``, ...
            start: Position of the first.
            logits: How many of the last tokens to return logits for; 0 for all.

        Returns:
            Logits ``[tokens, vocabulary_size]``, without gradients.
        """
        ...

    def generate(self, past: Any, first: int, start: int, tokens: int) -> list[int]:  # noqa: ANN401
        """Continue greedily.

        Args:
            past: What stands before ``first``; it grows.
            first: The first token of the answer, at position ``start``.
            start: Position of ``first``.
            tokens: Length of the answer at most, ``first`` included.

        Returns:
            Token ids from ``first`` on; the answer ends after one of ``end_tokens``, and at the end of the window.
        """
        out = [first]
        while len(out) < tokens and out[-1] not in self.end_tokens and start + len(out) < self.window:
            logits = self.forward(past, [out[-1]], start + len(out) - 1, logits=1)
            out.append(int(logits[-1].argmax()))
        return out

    def rows_of(self, past: Any, token_ids: Sequence[int], start: int) -> KVCache | None:  # noqa: ANN401
        """The last rows of what ``forward`` ran on, to be kept. An engine may lack it: they are computed again then.

        Args:
            past: What the tokens were run on; it ends with them.
            token_ids: The last tokens that it holds.
            start: Position of the first of them.

        Returns:
            Their cache, positions on, which may be the past's own memory; None where the past does not have them.
        """
        del past, token_ids, start
        return None

    def prefix_states(self, token_ids: Sequence[int], layers: int) -> Tensor:
        """Hidden states of a document before the first layer and after each of the first ``layers``.

        An engine without them cannot read corpora that were encoded with ``prefix_layers``, whose blobs take 0.63 (one
        layer) or 0.44 (two layers) of the bits at equal KL divergence (benchmarks/ablation.md: 14M model, novel and
        encyclopaedia).

        Returns:
            Float32 ``[tokens, (layers + 1) * hidden_size]``.

        Raises:
            ArgumentError: The engine cannot run its first layers alone, or has not as many.
        """
        del token_ids
        msg = f"this engine cannot run its first {layers} layers alone; encode with prefix_layers=0"
        raise ArgumentError(msg)

    def statistics(
        self, documents: Sequence[Sequence[int]], *, tokens: bool = True, sensitivity: bool = True
    ) -> Statistics | None:
        """What makes some errors in a cache matter more than others, for ``fit_profile``.

        An engine may leave out any part (benchmarks/ablation.md: SmolLM2-135M, bits at equal KL divergence): without
        the features of tokens a blob takes 1.4 times the bits at the coarsest level and 1.2 at the next. Where
        gradients do not tell how planes compare, it takes 1.1 to 1.2 times. Caches alone give a profile, too.

        Args:
            documents: Token ids of calibration documents.
            tokens: False leaves out the features of the vocabulary.
            sensitivity: False leaves out gradients, which tell how layers compare.

        Returns:
            The statistics; None where the engine knows nothing.
        """
        del documents, tokens, sensitivity
        return None

    def update_rows(
        self, cache: KVCache, token_ids: Sequence[int], rows: Tensor, narrow: Narrowing | None = None
    ) -> Tensor:
        """Compute tokens inside a prompt anew; see ``kvwire.reuse.RowsEngine``. An engine may lack it.

        Without it, linked documents stay as they were encoded: they do not see each other.

        Raises:
            MismatchError: The engine cannot.
        """
        del cache, token_ids, rows, narrow
        msg = "this engine cannot compute rows inside a prompt; load with repair none"
        raise MismatchError(msg)

    def look(self, cache: KVCache, token_ids: Sequence[int], *, layers: Sequence[int] = ()) -> AttentionSummary:
        """What tokens behind a prompt see of it; see ``kvwire.reuse.RowsEngine``. An engine may lack it.

        Raises:
            MismatchError: The engine cannot.
        """
        del cache, token_ids, layers
        msg = "this engine does not show its attention; choose a selector that needs none, such as first"
        raise MismatchError(msg)

    def allocate(self, tokens: int) -> KVCache:
        """A cache of zeros for a prompt, which decoders and ``extend`` write into; an engine may give its own memory.

        Loads ask for the prompt, its question and some of its answer, and fill a slice of it.

        Returns:
            Tensors ``[kv_heads, tokens, dim]`` of the engine's dtype on its device, positions on and from 0; layers
            without a cache hold no tokens.
        """
        return KVCache.zeros(self.meta, tokens, dtype=self.dtype, device=self.device)

    def synchronize(self) -> None:
        """Wait until all that this thread gave to the device is done, so that times are those of the work.

        Called from the thread that decodes, too, while another one runs any other method.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _no_tokenizer(_: object) -> NotFoundError:
    return NotFoundError("this engine has no tokenizer; pass token ids instead of texts")
