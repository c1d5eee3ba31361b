"""The engine protocol.

An engine runs one model. It inherits from ``Engine`` and implements a few methods; the others have defaults, and state
the cost of leaving them out.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvwire.engines.texts import TextEngine
from kvwire.errors import ArgumentError, MismatchError
from kvwire.types import KVCache

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvwire.codec import Statistics
    from kvwire.reuse import AttentionSummary, Narrowing, SoftTokens
    from kvwire.types import CacheMeta


class PassStoppedError(Exception):
    """A forward pass ended early on request, see ``Engine.stoppable``."""


class Engine(TextEngine, Protocol):
    """One model: documents to caches, and caches and a question to the first token.

    Methods of an engine are called by one thread at a time, except ``synchronize``, called by a decoding thread while
    another computes, and ``tokenize``, ``render_chat`` and ``check_chat``, called by threads that read texts.
    Properties may be read at any time. To be implemented: ``meta``, ``device``, ``dtype``, ``window``,
    ``vocabulary_size``, ``prefill``, ``extend``, ``past_key_values`` and ``forward``.
    """

    @property
    def meta(self) -> CacheMeta:
        """Metadata of this model's caches: model, tokenizer, layers and rotary regimes."""
        ...

    @property
    def model_config_digest(self) -> str:
        """SHA-256 of the model's configuration file, for its record in a store; empty without one."""
        return ""

    @property
    def device(self) -> torch.device:
        """The model's device."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's computation and caches."""
        ...

    @property
    def window(self) -> int:
        """Longest prompt in tokens."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return frozenset()

    @property
    def device_name(self) -> str:
        """Name of the hardware, under which speeds are remembered; empty for the processor."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    @property
    def can_recompute(self) -> bool:
        """Whether it can compute chunks; False if the model runs elsewhere."""
        return True

    @property
    def can_repair(self) -> bool:
        """Whether ``update_rows`` works."""
        return False

    @property
    def can_look(self) -> bool:
        """Whether ``look`` works."""
        return False

    @property
    def can_join(self) -> bool:
        """Whether ``extend_together`` may work, subject to ``check_together``."""
        return False

    @property
    def soft_tokens(self) -> SoftTokens | None:
        """Trained embeddings for token ids outside the vocabulary, and for negative ones; None without any."""
        return None

    def use_soft_tokens(self, soft: SoftTokens | None) -> None:
        """Set the trained embeddings of soft tokens, for every method: the k-th is ``soft_token(k)``.

        Optional: without it, neither documents nor link tokens can be soft tokens.

        Args:
            soft: The embeddings, replacing earlier ones; None: none.

        Raises:
            MismatchError: They are of another model, or the engine supports none.
        """
        if soft is not None:
            raise MismatchError("this engine takes no soft tokens; open the model with transformers")

    def prefill(self, documents: Sequence[Sequence[int]]) -> list[KVCache]:
        """Compute the caches of independent documents.

        Args:
            documents: Token ids of each.

        Returns:
            One cache per document, in order, positions on and from 0, with its token ids.

        Raises:
            ArgumentError: A document has no tokens, or more than the window.
        """
        ...

    def prefill_masked(self, token_ids: Sequence[int], visible: Tensor) -> KVCache:
        """Compute a document's cache under an attention mask. Optional: without it, there are no anchors.

        Args:
            token_ids: The document's.
            visible: Bool ``[tokens, tokens]``: row r sees column c; causal.

        Raises:
            ArgumentError: The mask is not of the document's size.
            MismatchError: The engine does not support it.
        """
        del token_ids, visible
        raise MismatchError("this engine does not run documents under a mask; encode without anchors")

    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache:
        """Compute tokens on top of the cache before them, as one prefill of both would.

        Args:
            prefix: Positions on, ending where the new tokens begin; its pruned entries are masked. None: nothing
                precedes them.
            token_ids: The new tokens.
            offset: Position of the first new token without a prefix.

        Returns:
            The cache of the new tokens alone.
        """
        ...

    @property
    def can_stop(self) -> bool:
        """Whether ``stoppable`` can stop a pass; if not, passes before a deadline are short: one may be slow."""
        return False

    def stoppable(self, stop: threading.Event) -> AbstractContextManager[None]:
        """Let forward passes in this context end soon after an event is set by any thread.

        Args:
            stop: The event.

        Returns:
            The context, entered by the thread that runs the passes. A stopped pass raises PassStoppedError and leaves
            its inputs unchanged.
        """
        del stop
        return nullcontext()

    def check_together(self) -> None:
        """Refuse if ``extend_together`` would not equal ``extend``; may run the model once to find out.

        Called before a load, by the thread of all other methods. Without it, passes of several loads run one after the
        other, which is slow if a pass's fixed cost dominates.

        Raises:
            MismatchError: The engine or its model cannot.
        """
        raise MismatchError("this engine extends caches one by one")

    def extend_together(
        self, prefixes: Sequence[KVCache | None], token_ids: Sequence[Sequence[int]], *, offsets: Sequence[int]
    ) -> list[KVCache]:
        """Run ``extend`` for several caches in one forward pass. Optional, see ``check_together``.

        Args:
            prefixes: Each row's prefix, as for ``extend``; lengths may differ.
            token_ids: The new tokens of each row; lengths may differ.
            offsets: Position of each row's first new token without a prefix.

        Returns:
            For each row the result of ``extend``, to 1e-5 of its largest numbers in float32; they share no memory.

        Raises:
            MismatchError: The engine cannot, or cannot with these caches.
        """
        del prefixes, token_ids, offsets
        self.check_together()
        raise MismatchError("this engine extends caches one by one")

    def past_key_values(self, cache: KVCache) -> Any:  # noqa: ANN401 - the engine's own
        """Convert a cache to the engine's own type for ``forward``, which grows with use.

        Raises:
            MismatchError: The cache is of another model.
        """
        ...

    def own_past(self, cache: KVCache) -> Any:  # noqa: ANN401 - the engine's own
        """``past_key_values`` only for ``forward`` and ``generate``, which may support gaps of pruned caches.

        Raises:
            MismatchError: The cache is of another model, or its gaps cannot be masked.
        """
        return self.past_key_values(cache)

    def growing_past(self, cache: KVCache, room: KVCache) -> Any:  # noqa: ANN401 - the engine's own
        """``own_past`` of a prompt with free memory after it, where new rows may be written.

        Optional: the default may copy the prompt's cache in the first pass.

        Args:
            cache: A slice of ``room`` from its first token on; it is not changed.
            room: From ``allocate``, at least as long as ``cache``; its rows after that belong to this past alone from
                now on.

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
            past: From ``past_key_values``; None without a prefix. It grows by the tokens.
            token_ids: Tokens at positions ``start``, ``start + 1``, ...
            start: Position of the first.
            logits: How many of the last tokens to return logits for; 0 for all.

        Returns:
            Logits ``[tokens, vocabulary_size]``, without gradients.
        """
        ...

    def generate(self, past: Any, first: int, start: int, tokens: int) -> list[int]:  # noqa: ANN401
        """Generate greedily.

        Args:
            past: Cache of all tokens before ``first``; it grows.
            first: First token of the answer, at position ``start``.
            start: Position of ``first``.
            tokens: Longest answer, ``first`` included.

        Returns:
            Token ids from ``first`` on; the answer ends after one of ``end_tokens``, or at the end of the window.
        """
        out = [first]
        while len(out) < tokens and out[-1] not in self.end_tokens and start + len(out) < self.window:
            logits = self.forward(past, [out[-1]], start + len(out) - 1, logits=1)
            out.append(int(logits[-1].argmax()))
        return out

    def rows_of(self, past: Any, token_ids: Sequence[int], start: int) -> KVCache | None:  # noqa: ANN401
        """The last rows that ``forward`` computed, to save them. Optional: without it they are computed again.

        Args:
            past: The past of the tokens; it ends with them.
            token_ids: Its last tokens.
            start: Position of the first of them.

        Returns:
            Their cache, positions on, perhaps in the past's own memory; None if the past lacks them.
        """
        del past, token_ids, start
        return None

    def prefix_states(self, token_ids: Sequence[int], layers: int) -> Tensor:
        """Hidden states of a document before the first layer and after each of the first ``layers``.

        Optional: without it, the engine cannot read corpora encoded with ``prefix_layers``, whose blobs take 0.63 (one
        layer) or 0.44 (two layers) of the bits at equal KL divergence (benchmarks/ablation.md: 14M model, novel and
        encyclopaedia).

        Returns:
            Float32 ``[tokens, (layers + 1) * hidden_size]``.

        Raises:
            ArgumentError: The engine cannot run only its first layers, or has fewer.
        """
        del token_ids
        raise ArgumentError(f"this engine cannot run only its first {layers} layers; encode with prefix_layers=0")

    def statistics(
        self, documents: Sequence[Sequence[int]], *, tokens: bool = True, sensitivity: bool = True
    ) -> Statistics | None:
        """Measure which errors in a cache matter most, for ``fit_profile``.

        All parts are optional (benchmarks/ablation.md: SmolLM2-135M, bits at equal KL divergence): without token
        features a blob takes 1.4 times the bits at the coarsest level and 1.2 at the next, without gradients, which
        compare planes, 1.1 to 1.2 times. Caches alone give a profile, too.

        Args:
            documents: Token ids of calibration documents.
            tokens: Whether to compute features of the vocabulary.
            sensitivity: Whether to compute gradients, which compare layers.

        Returns:
            The statistics; None if the engine has none.
        """
        del documents, tokens, sensitivity
        return None

    def update_rows(
        self, cache: KVCache, token_ids: Sequence[int], rows: Tensor, narrow: Narrowing | None = None
    ) -> Tensor:
        """Recompute tokens inside a prompt; see ``kvwire.reuse.RowsEngine``. Optional.

        Without it, linked documents are not repaired: they do not see each other.

        Raises:
            MismatchError: The engine cannot.
        """
        del cache, token_ids, rows, narrow
        raise MismatchError("this engine cannot compute rows inside a prompt; load with repair none")

    def look(self, cache: KVCache, token_ids: Sequence[int], *, layers: Sequence[int] = ()) -> AttentionSummary:
        """Attention of tokens after a prompt to it; see ``kvwire.reuse.RowsEngine``. Optional.

        Raises:
            MismatchError: The engine cannot.
        """
        del cache, token_ids, layers
        raise MismatchError("this engine does not show its attention; choose a selector that needs none, such as first")

    def allocate(self, tokens: int) -> KVCache:
        """A cache of zeros for decoders and ``extend`` to write into; may be the engine's own memory.

        Loads allocate the prompt, its question and part of its answer, and fill a slice.

        Returns:
            Tensors ``[kv_heads, tokens, dim]`` of the engine's dtype on its device, positions on and from 0; layers
            without a cache hold no tokens.
        """
        return KVCache.zeros(self.meta, tokens, dtype=self.dtype, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device has finished this thread's work, so that times include it.

        May be called by the decoding thread while another one runs any other method.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
