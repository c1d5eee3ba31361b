"""Caches of linked documents for plain ``generate``, which check how they are used.

transformers checks neither that a cache belongs to the model nor that ids, mask and positions continue it, so mistakes
would go unnoticed. These caches check every pass, through a hook on the model while they exist.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation.utils import GenerationMixin

from kvwire._forks import lock_of_process
from kvwire.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    import threading

    from torch import Tensor

_FLAT = 2
"""Dimensions of a mask before transformers expands it: [batch, tokens]."""


class Watch:
    """A hook on a model, removed with the last cache that refers to it.

    Attributes:
        model: Reference to the generating module: the engine's model, or its wrapper.
    """

    _alive: ClassVar[weakref.WeakValueDictionary[int, Watch]] = weakref.WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = lock_of_process()

    def __init__(self, model: torch.nn.Module) -> None:
        """Register the hook; see ``of``."""
        self.model = weakref.ref(model)
        hook = model.register_forward_pre_hook(_admit, with_kwargs=True)
        weakref.finalize(self, hook.remove)

    def __deepcopy__(self, _: object) -> Self:
        """Copies of a cache share the hook."""
        return self

    @classmethod
    def of(cls, model: torch.nn.Module) -> Watch:
        """Register a model's hook, or return the present one."""
        found = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
        with cls._lock:
            watch = cls._alive.get(id(found))
            if watch is None or watch.model() is not found:
                watch = cls._alive[id(found)] = cls(found)
            return watch


@dataclass
class Use:
    """Purpose of a cache, and its progress.

    Attributes:
        watch: Hook on the cache's model.
        mask: int64 ``[batch, tokens]``: 1 for tokens of documents and questions, 0 for padding on the left.
        shifts: int64 ``[batch]``: a token's position minus its cache index.
        question: Tokens that the first pass must bring.
        room: Capacity in tokens; None: unlimited.
        limit: First position with other rotation frequencies; None: none.
        repeats: Rows per prompt, known from the first pass on; 0 before.
    """

    watch: Watch
    mask: Tensor
    shifts: Tensor
    question: int
    room: int | None
    limit: int | None
    repeats: int = 0


class _Linked:
    """Checks shared by both kinds of caches."""

    use: Use | None = None
    layers: list[Any]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Refuse tokens of a model without the hook; see the base class."""
        if self.use is not None and not self.use.repeats and not torch.compiler.is_compiling():
            msg = "this cache is for the model of the engine that made it; call engine.model.generate(**inputs)"
            raise MismatchError(msg)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[misc]

    def admit(self, model: torch.nn.Module, named: dict[str, Any]) -> None:
        """Check a forward pass's inputs, and add rows for beams and sampled sequences."""
        use = self.use
        if use is None:
            return
        if use.watch.model() is not model:
            raise MismatchError("this cache is for another model; call generate of the model whose engine made it")
        ids = next(named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None)
        batch, count = ids.shape[:2]
        held = int(self.get_seq_length())  # type: ignore[attr-defined]
        if not use.repeats:
            _check_question(use, batch, count)
        repeats = use.repeats or batch // len(use.mask)
        if batch != repeats * len(use.mask):
            raise ArgumentError(f"the cache holds {repeats * len(use.mask)} rows, the model was given {batch}; {_ANEW}")
        starts = (held + use.shifts).repeat_interleave(repeats)
        _check_continues(use, named, starts, held + count, repeats)
        _check_room(use, held + count, int(starts.max()) + count)
        if not use.repeats:
            use.repeats = repeats
            if repeats > 1:
                self._repeat(repeats)

    def _repeat(self, repeats: int) -> None:
        self.batch_repeat_interleave(repeats)  # type: ignore[attr-defined]


class LinkedCache(_Linked, DynamicCache):
    """A cache that grows; sliding layers store their window."""


class LinkedStaticCache(_Linked, StaticCache):
    """A cache of a fixed size, for ``torch.compile``."""

    def _repeat(self, repeats: int) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                keys, values = (each.repeat_interleave(repeats, 0) for each in (layer.keys, layer.values))
                layer.lazy_initialization(keys, values)  # allocates new tensors, at addresses that stay
                layer.keys.copy_(keys)
                layer.values.copy_(values)


_ANEW = "inputs serve one call: make new ones with generate_inputs"


def _check_question(use: Use, batch: int, count: int) -> None:
    """Check the first pass; transformers runs other ids than given if the mask does not match."""
    if count != use.question:
        raise ArgumentError(
            f"the first pass must bring the question's {use.question} tokens, it brings {count}; pass input_ids and "
            f"attention_mask ({use.mask.shape[1]} tokens, the documents' included) as generate_inputs returned them, "
            "and neither prefill_chunk_size nor assisted generation, which pass over caches"
        )
    if batch % len(use.mask):
        msg = f"the cache holds {len(use.mask)} prompts, the model was given {batch} rows; pass input_ids as returned"
        raise ArgumentError(msg)


def _check_continues(use: Use, named: dict[str, Any], starts: Tensor, total: int, repeats: int) -> None:
    """Check that mask and positions are those of the next tokens."""
    mask, positions = named.get("attention_mask"), named.get("position_ids")
    first = not use.repeats
    if isinstance(mask, torch.Tensor) and mask.ndim == _FLAT:
        fits = mask.shape[1] == total
        if fits and first:
            fits = torch.equal(mask.to(use.mask), use.mask.repeat_interleave(repeats, 0).expand(len(mask), -1))
    else:
        fits = mask is not None or bool(use.mask.all())
    if positions is None:
        begins = torch.full_like(starts, total - (use.question if first else 1))
    else:
        begins = positions.reshape(-1, *positions.shape[-2:])[0, :, 0].to(starts)
    if fits and bool((begins == starts).all()):
        return
    if first:
        msg = (
            f"attention_mask must cover {total} tokens, those of documents and question, as generate_inputs returned "
            "it; with padding, position_ids must follow it"
        )
    else:
        msg = f"what is run does not continue this cache of {int(starts.max())} tokens; {_ANEW}"
    raise ArgumentError(msg)


def _check_room(use: Use, total: int, end: int) -> None:
    if use.room is not None and total > use.room:
        msg = f"the cache has room for {use.room} tokens; make it with a larger max_cache_len, or generate fewer"
        raise ArgumentError(msg)
    if use.limit is not None and end > use.limit:
        raise ArgumentError(
            f"the answer reaches position {use.limit}, where the model's rotary frequencies change for all tokens; "
            "lower max_new_tokens, or run the whole prompt as text"
        )


def _admit(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    past = named.get("past_key_values")
    if isinstance(past, _Linked) and not torch.compiler.is_compiling():
        past.admit(module, {"input_ids": inputs[0], **named} if inputs else named)
