"""Inputs of plain ``model.generate`` for linked documents and questions."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.utils import GenerationMixin

from kvwire.engines.transformers.generation_cache import LinkedCache, LinkedStaticCache, Use, Watch
from kvwire.engines.transformers.plain import fill
from kvwire.errors import ArgumentError
from kvwire.reuse import LinkedPrompt
from kvwire.types import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.engines.transformers.engine import TransformersEngine
    from kvwire.types import Chat

Prompt = LinkedPrompt | KVCache
_TAKES_QUESTIONS = "next_sequence_length" in signature(GenerationMixin.prepare_inputs_for_generation).parameters
"""Whether generate runs ids shorter than the mask as they are; before transformers 5.3 it drops as many as the cache
holds."""


@dataclass(frozen=True, eq=False)
class _Row:
    """One prompt: tensors for the cache, and token ids still to run.

    pairs: keys and values ``[1, kv_heads, tokens, dim]``. holes: number of pruned tokens.
    """

    pairs: list[tuple[Tensor, Tensor]]
    tokens: int
    holes: int
    ids: list[int]


def generate_inputs(
    engine: TransformersEngine,
    prompts: Prompt | Sequence[Prompt],
    questions: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Tensor,
    *,
    chat: Chat | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Sequence[Sequence[int]] | None = None,
    max_cache_len: int | None = None,
) -> dict[str, Any]:
    """Make the inputs of ``engine.model.generate(**inputs, max_new_tokens=..., ...)``.

    Greedy search, sampling, beams and ``num_return_sequences`` work. The inputs serve one call; prompts are copied and
    may be reused. Shorter prompts of a batch are padded on the left, in the cache. If questions differ in length, the
    cache takes the beginnings of longer ones, and ``input_ids`` hold equally many tokens of each. New tokens are
    ``out[:, inputs["input_ids"].shape[1]:]``. Call it from one thread at a time, like an engine's methods.

    Args:
        engine: Engine of the generating model.
        prompts: Linked documents, such as ``Answer.prompt``, one per question; a single one serves all questions.
        questions: A text, token ids, or one of these for each row of a batch; a tensor ``[batch, tokens]`` may be
            padded. Texts are tokenised without special tokens.
        chat: The chat of the prompts' load (``Loader.ask``): questions are texts, put into the chat's template.
        attention_mask: ``[batch, tokens]``, of a padded tensor of questions: 0 for padding.
        document_ids: Token ids of each prompt's documents, concatenated, with or without BOS. ``input_ids`` then hold
            whole prompts, padded on the left, for code that reads all ids, such as repetition penalties.
        max_cache_len: Use a ``StaticCache`` of so many tokens, for ``torch.compile``: padding, prompt, question and
            answer.

    Returns:
        ``input_ids`` int64 ``[batch, tokens]``, ``attention_mask`` int64 ``[batch, padding and all tokens]``,
        ``past_key_values``, and ``position_ids`` if prompts were pruned; on the engine's device.

    Raises:
        ArgumentError: Prompts, questions, chat, mask and ids do not match, a prompt with its question exceeds the
            model's window or ``max_cache_len``, or transformers is older than 5.3.
        MismatchError: A prompt is of another model, or pruned in a way that plain caches cannot hold.
        NotFoundError: A question is a text, and the engine has no tokenizer, or no chat template.
    """
    if not _TAKES_QUESTIONS:
        msg = f"transformers {version('transformers')} cannot generate from question ids alone; install 5.3 or later"
        raise ArgumentError(msg)
    heads: set[tuple[int, ...]] = set()
    if chat is not None:
        questions, heads = _of_chat(engine, chat, questions)
    queries = _questions(engine, questions, attention_mask)
    linked = [prompts] * len(queries) if isinstance(prompts, (LinkedPrompt, KVCache)) else list(prompts)
    if len(linked) != len(queries) or not queries:
        msg = f"{len(linked)} prompts and {len(queries)} questions make no batch; give one prompt for each question"
        raise ArgumentError(msg)
    if heads and {each.opening if isinstance(each, LinkedPrompt) else () for each in linked} != heads:
        msg = "the prompts do not begin as this chat does: load them with the same chat (Loader.ask(chat=...))"
        raise ArgumentError(msg)
    shared = min(len(ids) for ids in queries)
    rows = [_row(engine, prompt, ids, shared) for prompt, ids in zip(linked, queries, strict=True)]
    if document_ids is not None and len(document_ids) == len(linked):
        bos = engine.opening_tokens
        document_ids = [_with_head(prompt, ids, bos) for prompt, ids in zip(linked, document_ids, strict=True)]
    return _batch(engine, rows, _whole(engine, rows, queries, document_ids), max_cache_len)


def _with_head(prompt: Prompt, ids: Sequence[int], bos: tuple[int, ...]) -> tuple[int, ...]:
    """Add the prompt's head to its documents' ids, which may begin with it, with BOS, or with neither."""
    head = prompt.opening if isinstance(prompt, LinkedPrompt) else ()
    if not head or tuple(ids[: len(head)]) == head:
        return tuple(ids)
    return (*head, *(ids[len(bos) :] if bos and tuple(ids[: len(bos)]) == bos else ids))


def _of_chat(
    engine: TransformersEngine, chat: Chat, questions: Any  # noqa: ANN401
) -> tuple[list[Sequence[int]], set[tuple[int, ...]]]:  # fmt: skip
    """Tokens after the documents for each question, and the sets of tokens before them."""
    each = [questions] if isinstance(questions, str) else list(questions)
    if not all(isinstance(one, str) for one in each):
        raise ArgumentError("in a chat questions are texts: the template is read together with them")
    rendered = [engine.render_chat(chat, one) for one in each]
    return [one.tail for one in rendered], {one.head for one in rendered}


def _questions(engine: TransformersEngine, questions: Any, mask: Tensor | None) -> list[list[int]]:  # noqa: ANN401
    """Token ids of each question."""
    if mask is not None and (not isinstance(questions, torch.Tensor) or mask.shape != questions.shape):
        shape = tuple(questions.shape) if isinstance(questions, torch.Tensor) else "lists"
        msg = f"attention_mask {tuple(mask.shape)} must have the shape of a tensor of questions, got {shape}"
        raise ArgumentError(msg)
    if isinstance(questions, torch.Tensor):
        table = questions[None] if questions.ndim == 1 else questions
        mask_rows = torch.ones_like(table) if mask is None else mask.reshape(table.shape)
        queries = [row[keep.bool()].tolist() for row, keep in zip(table, mask_rows, strict=True)]
    else:
        single = isinstance(questions, str) or (len(questions) and isinstance(questions[0], Integral))
        each = [questions] if single else list(questions)
        queries = [
            engine.tokenize(one, place="last", trust="frame") if isinstance(one, str) else [int(token) for token in one]
            for one in each
        ]
    if not all(queries):
        raise ArgumentError("a question needs at least one token")
    return queries


@torch.no_grad()
def _row(engine: TransformersEngine, prompt: Prompt, question: list[int], shared: int) -> _Row:
    """A prompt's tensors, with its question except the last ``shared`` tokens."""
    cache = prompt.cache if isinstance(prompt, LinkedPrompt) else prompt
    if cache.meta.offset:
        msg = f"a prompt begins at position 0, this cache at {cache.meta.offset}; link it with kvwire.link"
        raise ArgumentError(msg)
    engine.check_ids(question, cache.tokens)
    pairs, positions = engine.tensors_for(cache)
    head = question[: len(question) - shared]
    holes = 0 if positions is None else cache.tokens - len(positions)
    if head:
        more, _ = engine.tensors_for(engine.extend(cache, head))
        pairs = [_joined(*both) for both in zip(pairs, more, strict=True)]
    return _Row(pairs, cache.tokens - holes + len(head), holes, question[len(head) :])


def _joined(pair: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not pair[0].numel():
        return pair
    return torch.cat((pair[0], more[0]), 2), torch.cat((pair[1], more[1]), 2)


def _whole(
    engine: TransformersEngine,
    rows: Sequence[_Row],
    queries: list[list[int]],
    documents: Sequence[Sequence[int]] | None,
) -> list[list[int]]:
    """Each row's ``input_ids``."""
    if documents is None:
        return [row.ids for row in rows]
    lengths = [row.tokens + len(row.ids) - len(ids) for row, ids in zip(rows, queries, strict=True)]
    if any(row.holes for row in rows) or [len(ids) for ids in documents] != lengths:
        raise ArgumentError(f"document_ids must hold {lengths} tokens, those of prompts of which nothing was pruned")
    for ids in documents:
        engine.check_ids(ids)
    return [[*map(int, ids), *question] for ids, question in zip(documents, queries, strict=True)]


def _batch(
    engine: TransformersEngine, rows: list[_Row], ids: list[list[int]], max_cache_len: int | None
) -> dict[str, Any]:
    held, question, device = max(row.tokens for row in rows), len(rows[0].ids), engine.device
    total = held + question
    if max_cache_len is not None and max_cache_len <= total:
        msg = f"max_cache_len {max_cache_len} leaves no room behind {total} tokens of prompt and question; enlarge it"
        raise ArgumentError(msg)
    pads = torch.tensor([held - row.tokens for row in rows], device=device)
    shifts = torch.tensor([row.holes for row in rows], device=device) - pads
    places = torch.arange(total, device=device)
    mask = (places >= pads[:, None]).long()
    limits = [rope.max_positions for rope in engine.meta.ropes if rope.max_positions is not None]
    past = _filled(engine, rows, held, max_cache_len)
    past.use = Use(Watch.of(engine.model), mask.clone(), shifts, question, max_cache_len, min(limits, default=None))
    width, pad = max(map(len, ids)), _pad_token(engine)
    inputs = {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in ids], device=device),
        "attention_mask": mask,
        "past_key_values": past,
    }
    if any(row.holes for row in rows):
        inputs["position_ids"] = (places + shifts[:, None])[:, -question:]
    return inputs


def _filled(
    engine: TransformersEngine, rows: list[_Row], held: int, max_cache_len: int | None
) -> LinkedCache | LinkedStaticCache:
    """One cache for all rows."""
    config = engine.model.config
    past: LinkedCache | LinkedStaticCache = LinkedCache(config=config)
    if max_cache_len is not None:
        past = LinkedStaticCache(config=config, max_cache_len=max_cache_len)
    for layer, parts in enumerate(zip(*(row.pairs for row in rows), strict=True)):
        fill(past, layer, _stacked([keys for keys, _ in parts], held), _stacked([values for _, values in parts], held))
    return past


def _stacked(parts: list[Tensor], held: int) -> Tensor:
    """One layer of all rows, ``[batch, kv_heads, held, dim]``, padded on the left.

    The padding is 1: older static caches take zeros for free slots.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    whole = first.new_ones(len(parts), first.shape[1], held, first.shape[3])
    for row, part in zip(whole, parts, strict=True):
        row[:, held - part.shape[2] :] = part[0]
    return whole


def _pad_token(engine: TransformersEngine) -> int:
    """Token id for padding."""
    known = getattr(engine.model.generation_config, "pad_token_id", None)
    return known if isinstance(known, int) and known >= 0 else 0
