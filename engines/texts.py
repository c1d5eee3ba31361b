"""What an engine does with texts: tokens, and chats by the model's template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from kvwire.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types import Chat, RenderedChat

Place: TypeAlias = Literal["first", "middle", "last"]
"""Place of a text in a prompt."""
Trust: TypeAlias = Literal["frame", "document"]
"""Author of a text: ``frame``, the caller, whose text may contain control tokens; ``document``, all others."""


class TextEngine(Protocol):
    """The part of an engine that needs no weights; all of it is optional.

    ``tokenize``, ``render_chat`` and ``check_chat`` are called by threads that read texts, while others compute.
    """

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be tokenised; if not, callers pass token ids."""
        return False

    @property
    def opening_tokens(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before a whole text, such as BOS; ``tokenize`` leaves them out."""
        return ()

    def tokenize(self, text: str, *, place: Place = "middle", trust: Trust = "document") -> list[int]:
        """Tokenise a piece of a prompt, without special tokens around it.

        Args:
            text: The piece.
            place: Its place in the prompt; documents count as ``middle``, wherever they are.
            trust: ``frame``: the caller's own text, which may contain control tokens; ``document``: plain text.

        Raises:
            NotFoundError: The engine has no tokenizer.
        """
        raise _no_tokenizer((text, place, trust))

    def detokenize(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """The text of token ids.

        Args:
            token_ids: Of the vocabulary.
            special: Whether special tokens are spelt out; answers leave them out.

        Raises:
            NotFoundError: The engine has no tokenizer.
        """
        raise _no_tokenizer((token_ids, special))

    def render_chat(self, chat: Chat, question: str) -> RenderedChat:
        """Render a chat by the model's template. Optional: without it, ``Loader.ask`` takes no chats.

        Args:
            chat: Turns around the documents.
            question: The user's text after them.

        Returns:
            Token ids before and after the documents, and those that end the answer.

        Raises:
            NotFoundError: The model has no chat template.
            ArgumentError: The template fails on this chat, or alters the documents' text.
        """
        del chat, question
        raise NotFoundError("this engine renders no chats; open the model with transformers, or pass token ids")

    def check_chat(self, chat: Chat, question: str, documents: Sequence[Sequence[int]], rendered: RenderedChat) -> str:
        """Compare the prompt's tokens with those of the template rendered over the whole text.

        Args:
            chat: Turns around the documents.
            question: The user's text after them.
            documents: Token ids of each.
            rendered: The output of ``render_chat``.

        Returns:
            The first difference in words; empty if there is none.
        """
        del chat, question, documents, rendered
        return ""

    def render_turn(self, chat: Chat, question: str) -> RenderedChat:
        """Render the next user turn of a conversation, after an answer. Optional.

        Args:
            chat: The conversation; its earlier turns and system text are not rendered.
            question: The user's text.

        Returns:
            The tokens, all in ``tail``.

        Raises:
            NotFoundError: The model has no chat template.
            ArgumentError: The template fails on this chat.
        """
        return self.render_chat(chat, question)

    def check_turns(self, chat: Chat, token_ids: Sequence[int]) -> str:
        """Compare a conversation's tokens with those of its template rendered over all turns.

        Args:
            chat: The conversation.
            token_ids: All its tokens.

        Returns:
            The first difference in words; empty if there is none.
        """
        del chat, token_ids
        return ""


def _no_tokenizer(_: object) -> NotFoundError:
    return NotFoundError("this engine has no tokenizer; pass token ids instead of texts")
