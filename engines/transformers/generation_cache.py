"""Caches that plain ``generate`` takes: filled with linked documents, and careful about what they are used with.

transformers looks neither at whose cache it is given nor at whether ids, mask and positions continue it: what is wrong
there is wrong in silence. These caches look, at every pass, through a hook that the model has while they are there.
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
"""Dimensions of a mask before it is made ready for a kind of layer: [batch, tokens]."""


class Watch:
    """A hook on a model, which goes with the last cache that refers to it.

    Attributes:
        model: A reference to the module that generates: the engine's model, or what that wraps.
    """

    _alive: ClassVar[weakref.WeakValueDictionary[int, Watch]] = weakref.WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = lock_of_process()

    def __init__(self, model: torch.nn.Module) -> None:
        """Put the hook on; see ``of``."""
        self.model = weakref.ref(model)
        hook = model.register_forward_pre_hook(_admit, with_kwargs=True)
        weakref.finalize(self, hook.remove)

    def __deepcopy__(self, _: object) -> Self:
        """Copies of a cache are watched by the same hook."""
        return self

    @classmethod
    def of(cls, model: torch.nn.Module) -> Watch:
        """Have caches look at what a model is given."""
        found = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
        with cls._lock:
            watch = cls._alive.get(id(found))
            if watch is None or watch.model() is not found:
                watch = cls._alive[id(found)] = cls(found)
            return watch


@dataclass
class Use:
    """What a cache was made for, and how far it was used.

    Attributes:
        watch: On the model that the cache is for.
        mask: int64 ``[batch, tokens]``: 1 for tokens of documents and questions, 0 for padding on the left.
        shifts: int64 ``[batch]``: a token's position less its place in the cache.
        question: Tokens that the first pass must bring.
        room: Tokens that the cache can hold; None: any number.
        limit: First position at which the model's frequencies change; None: none.
        repeats: Rows that each prompt takes, known from the first pass on; 0 before it.
    """

    watch: Watch
    mask: Tensor
    shifts: Tensor
    question: int
    room: int | None
    limit: int | None
    repeats: int = 0


class _Linked:
    """What both kinds of caches add to those of transformers."""

    use: Use | None = None
    layers: list[Any]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Refuse tokens of a model that is not watched; see the base class."""
        if self.use is not None and not self.use.repeats and not torch.compiler.is_compiling():
            msg = "this cache is for the model of the engine that made it; call engine.model.generate(**inputs)"
            raise MismatchError(msg)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[misc]

    def admit(self, model: torch.nn.Module, named: dict[str, Any]) -> None:
        """Look at what a forward pass is given, and make rows for beams and for sequences that are sampled."""
        use = self.use
        if use is None:
            return
        if use.watch.model() is not model:
            msg = "this cache is for another model; call generate of the model whose engine made it"
            raise MismatchError(msg)
        ids = next(named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None)
        batch, count = ids.shape[:2]
        held = int(self.get_seq_length())  # type: ignore[attr-defined]
        if not use.repeats:
            _check_question(use, batch, count)
        repeats = use.repeats or batch // len(use.mask)
        if batch != repeats * len(use.mask):
            msg = f"the cache holds {repeats * len(use.mask)} rows, the model was given {batch}; {_ANEW}"
            raise ArgumentError(msg)
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
    """A cache that grows; layers with a window keep what it sees."""


class LinkedStaticCache(_Linked, StaticCache):
    """A cache of a fixed size, for ``torch.compile``."""

    def _repeat(self, repeats: int) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                keys, values = (each.repeat_interleave(repeats, 0) for each in (layer.keys, layer.values))
                layer.lazy_initialization(keys, values)  # makes them anew, at addresses that stay
                layer.keys.copy_(keys)
                layer.values.copy_(values)


_ANEW = "inputs serve one call: make new ones with generate_inputs"


def _check_question(use: Use, batch: int, count: int) -> None:
    """What the first pass brings; transformers runs other ids than it was given where the mask does not fit them."""
    if count != use.question:
        msg = (
            f"the first pass must bring the question's {use.question} tokens, it brings {count}; pass input_ids and "
            f"attention_mask ({use.mask.shape[1]} tokens, the documents' included) as generate_inputs returned them, "
            "and neither prefill_chunk_size nor assisted generation, which pass over caches"
        )
        raise ArgumentError(msg)
    if batch % len(use.mask):
        msg = f"the cache holds {len(use.mask)} prompts, the model was given {batch} rows; pass input_ids as returned"
        raise ArgumentError(msg)


def _check_continues(use: Use, named: dict[str, Any], starts: Tensor, total: int, repeats: int) -> None:
    """Whether mask and positions are those of the tokens that come next."""
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
        msg = (
            f"the answer reaches position {use.limit}, where the model's rotary frequencies change for all tokens; "
            "lower max_new_tokens, or run the whole prompt as text"
        )
        raise ArgumentError(msg)


def _admit(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    past = named.get("past_key_values")
    if isinstance(past, _Linked) and not torch.compiler.is_compiling():
        past.admit(module, {"input_ids": inputs[0], **named} if inputs else named)
