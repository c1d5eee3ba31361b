"""Chats with documents in the user's turn, as requests to vLLM: rendered here, by the tokenizer alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.engines.transformers.chat import apart, render
from kvwire.engines.transformers.opening import open_tokenizer
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.types import digest_tokens

from .requests import body_of, no_head

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.runtime.corpus import Corpus
    from kvwire.types import Chat

    from .requests import Choice


def chat_body(
    corpus: Corpus, choice: Choice, chat: Chat, question: str, *, tokenizer: str | Path, **more: object
) -> dict[str, object]:
    """The body of a request to ``/v1/completions``: a chat whose last turn holds documents and a question.

    The prompt is what the model's chat template makes of the turns. The template's tokens before the documents are
    loaded without loss: ``kvwire encode --chat`` or ``Corpus.put_chat_head`` puts their rows into the store, once for
    each system text, earlier turns and words before the documents.

    Args:
        corpus: The documents', with or without an engine.
        choice: Which documents, and how; its ``head`` is set here.
        chat: The system text, earlier turns, and the user's words around documents and question.
        question: Behind the documents.
        tokenizer: The model's folder; no weights are read.
        **more: Further fields: ``model``, ``max_tokens``, ``temperature`` and so on.

    Returns:
        Fields for JSON, as of ``request_body``; ``stop_token_ids`` end the assistant's turn.

    Raises:
        ArgumentError: No documents are named, the template refuses the chat, or gives the same turns other tokens.
        NotFoundError: The tokenizer has no template, or the store lacks a document or the rows before the documents.
    """
    if not choice.documents:
        raise ArgumentError("a chat's request names documents; without any, send the turns to /v1/chat/completions")
    pieces = open_tokenizer(tokenizer)
    texts = [tuple(corpus.text(corpus.find(name))) for name in choice.documents]
    rendered = render(pieces, chat, question)
    if trouble := apart(pieces, chat, question, texts, rendered):
        raise ArgumentError(trouble)
    head = rendered.head
    entry = corpus.catalog.by_tokens(corpus.meta.config_digest(), digest_tokens(head)) if head else None
    if head and (entry is None or entry.is_text):
        raise NotFoundError(no_head(len(head)))
    prompt = [*head, *(token for text in texts for token in text), *rendered.tail]
    stop = {"stop_token_ids": sorted(rendered.stop)} if rendered.stop else {}
    return body_of(corpus, replace(choice, head=len(head)), prompt, stop | more)
