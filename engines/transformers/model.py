"""A model and its tokenizer as described to kvwire: layout, identity, devices, limits, text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.engines.base import Engine
from kvwire.engines.transformers.devices import Devices, input_device, is_spread
from kvwire.engines.transformers.registration import learn_layout, window_of
from kvwire.engines.transformers.tokenizer_limits import no_panics
from kvwire.engines.transformers.tokenizing import PieceTokenizer
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.types import CacheMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvwire.engines.texts import Place, Trust
    from kvwire.engines.transformers.soft import SoftEmbedding
    from kvwire.reuse import SoftTokens
    from kvwire.types import Chat, RenderedChat


class DescribedModel(Engine):
    """Description of a model and its tokenizer; ``TransformersEngine`` runs it, and is constructed alike.

    Attributes:
        model: A decoder with rotary keys; its layout is learnt and tested here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        model_id: str = "",
        revision: str = "",
        tokenizer_id: str | None = "",
        model_config_digest: str = "",
    ) -> None:
        """Learn the layout.

        Args:
            model: A decoder with rotary keys, in any precision, on one device or several.
            tokenizer: The model's; None if callers pass token ids.
            model_id: The model's name, for its caches.
            revision: Version of the weights, for its caches.
            tokenizer_id: Digest of the tokenizer, for its caches; None: computed.
            model_config_digest: SHA-256 of its config.json, for its record in a store.

        Raises:
            RopeRegimeError: The model's keys cannot be rotated to other positions, so its caches cannot be stored.
            MismatchError: The model's caches cannot be stored for another reason.
        """
        torch.nn.Module.eval(model)
        self.model = model
        self._spread = Devices.of(model) if is_spread(model) else None
        self._tokenizer = tokenizer
        self._pieces = None if tokenizer is None else PieceTokenizer(tokenizer)
        self._soft: tuple[SoftTokens, SoftEmbedding] | None = None
        self._model_config_digest = model_config_digest
        layers, ropes = learn_layout(model, self.devices)
        dtype = str(model.dtype).removeprefix("torch.")
        if tokenizer_id is None:
            tokenizer_id = self._pieces.digest if self._pieces else ""
        self._meta = CacheMeta(model_id, revision, tokenizer_id, dtype, layers, ropes)

    @property
    def meta(self) -> CacheMeta:
        """Metadata of its caches."""
        return self._meta

    @property
    def model_config_digest(self) -> str:
        """SHA-256 of the model's config.json; empty if the model is not from a folder."""
        return self._model_config_digest

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and caches."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def end_tokens(self) -> frozenset[int]:
        """End-of-text tokens of the generation settings."""
        ends = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        return frozenset({ends} if isinstance(ends, int) else ends or ())

    @property
    def device(self) -> torch.device:
        """Device of token ids and of whole caches."""
        return self.devices.inputs

    @property
    def devices(self) -> Devices:
        """Devices of the layers' caches."""
        return self._spread or Devices(input_device(self.model))

    @property
    def window(self) -> int:
        """Longest prompt in tokens.

        If rotary frequencies change at some length (dynamic, longrope), it ends there: caches from before and after do
        not fit together.
        """
        limits = [regime.max_positions for regime in self.meta.ropes if regime.max_positions is not None]
        return min([window_of(self.model), *limits])

    @property
    def soft_tokens(self) -> SoftTokens | None:
        """Trained embeddings for token ids outside the vocabulary, and for negative ones; None without any."""
        return self._soft[0] if self._soft else None

    def use_soft_tokens(self, soft: SoftTokens | None) -> None:
        """Set the trained embeddings of soft tokens, for every method, through hooks on the model.

        Args:
            soft: The embeddings, replacing earlier ones; None: none.

        Raises:
            MismatchError: They are of another model, or its layers read token ids.
        """
        made = None
        if soft is not None:
            from kvwire.engines.transformers.soft import SoftEmbedding

            soft.check_model(self.meta, int(self.model.config.get_text_config(decoder=True).hidden_size))
            made = (soft, SoftEmbedding(self.model, soft.embeddings.to(self.device, self.dtype)))
        if self._soft:
            self._soft[1].remove()
        self._soft = made

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model's folder has a tokenizer."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            NotFoundError: The model's folder has none.
        """
        if self._tokenizer is None:
            raise NotFoundError(
                "the model's folder holds no tokenizer; put tokenizer.json beside the weights, "
                "or call the library with token ids, which need none"
            )
        return self._tokenizer

    @property
    def opening_tokens(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before a whole text, such as BOS."""
        return self._pieces.opening if self._pieces else ()

    def tokenize(self, text: str, *, place: Place = "middle", trust: Trust = "document") -> list[int]:
        """Tokenise a piece of a prompt, without special tokens around it.

        Args:
            text: Of any length.
            place: Its place in the prompt; documents count as ``middle``, wherever they are.
            trust: ``frame``: the caller's own text, which may contain control tokens; ``document``: plain text.

        Returns:
            Its token ids.

        Raises:
            NotFoundError: There is no tokenizer.
            ArgumentError: The text is not valid Unicode.
            CorruptError: The tokenizer's rules fail on this text.
        """
        return (self._pieces or PieceTokenizer(self.tokenizer))(text, place, trust)

    def render_chat(self, chat: Chat, question: str) -> RenderedChat:
        """Render a chat by the model's template; see ``Engine.render_chat``."""
        from kvwire.engines.transformers.chat import render  # few prompts are chats

        with no_panics():
            return render(self._pieces or PieceTokenizer(self.tokenizer), chat, question)

    def check_chat(self, chat: Chat, question: str, documents: Sequence[Sequence[int]], rendered: RenderedChat) -> str:
        """Compare the prompt's tokens with the template's; see ``Engine.check_chat``."""
        from kvwire.engines.transformers.chat import apart

        with no_panics():
            return apart(self._pieces or PieceTokenizer(self.tokenizer), chat, question, documents, rendered)

    def render_turn(self, chat: Chat, question: str) -> RenderedChat:
        """Render the next user turn after an answer; see ``Engine.render_turn``."""
        from kvwire.engines.transformers.chat import render

        with no_panics():
            return render(self._pieces or PieceTokenizer(self.tokenizer), chat, question, further=True)

    def check_turns(self, chat: Chat, token_ids: Sequence[int]) -> str:
        """Compare a conversation's tokens with its template's; see ``Engine.check_turns``."""
        from kvwire.engines.transformers.chat import turns_apart

        with no_panics():
            return turns_apart(self._pieces or PieceTokenizer(self.tokenizer), chat, token_ids)

    def detokenize(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """The text of token ids.

        Args:
            token_ids: Of the model's vocabulary.
            special: Whether special tokens are spelt out; answers leave them out.

        Returns:
            The text.

        Raises:
            NotFoundError: There is no tokenizer.
            CorruptError: The tokenizer's rules fail on these tokens.
        """
        with no_panics():
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    def check_ids(self, token_ids: Sequence[int], start: int = 0) -> None:
        """Refuse tokens that the model cannot run.

        Args:
            token_ids: The tokens.
            start: Position of the first.

        Raises:
            ArgumentError: There are none, they exceed the window, or they are not in the vocabulary.
        """
        if not len(token_ids):
            raise ArgumentError("a document without tokens has no cache; leave it out")
        if start + len(token_ids) > self.window:
            raise ArgumentError(
                f"{start + len(token_ids)} tokens do not fit the model's window of {self.window}; "
                "split the document or name fewer documents"
            )
        soft = self.soft_tokens.count if self.soft_tokens else 0
        if min(token_ids) < -soft or max(token_ids) >= self.vocabulary_size + soft:
            hint = f", with {soft} soft tokens" if soft else ""
            raise ArgumentError(
                f"token ids must lie in 0 to {self.vocabulary_size - 1}{hint}; were they made by this model's "
                "tokenizer, and are the layout's soft tokens in use?"
            )
