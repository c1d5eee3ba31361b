"""A pass over a cache that is still being decoded."""

from __future__ import annotations

import pytest
import torch

from kvwire.codec import encode, positions_off
from kvwire.codec.api.decode import BlobDecoder
from kvwire.engines.transformers.waiting import held
from kvwire.errors import ArgumentError
from kvwire.types import KVCache

from .families import config_of, documents, engine_of, error_between, make_model, query


class Late:
    """A layer's part that arrives only when it is waited for."""

    def __init__(self, cache, source, layer, log):
        self._pairs = [(cache.keys[layer], source.keys[layer]), (cache.values[layer], source.values[layer])]
        self._layer, self._log = layer, log

    def hold(self):
        for target, arrived in self._pairs:
            target.copy_(arrived)
        self._log.append(self._layer)


def empty_like(cache):
    return KVCache([torch.full_like(k, 1e6) for k in cache.keys], [torch.full_like(v, 1e6) for v in cache.values],
                   cache.meta, cache.token_ids)  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3"])
def test_layers_wait_for_their_own_part(family):
    engine = engine_of(family)
    (whole,) = engine.prefill([documents()[0]])
    expected = engine.forward(engine.past_key_values(whole), query(), whole.tokens)
    cache, log = empty_like(whole), []
    layers = [Late(cache, whole, index, log) for index in range(len(whole.keys))]
    logits, past = engine.forward_when_ready(cache, layers, query())
    assert error_between(logits, expected) < 1e-5
    assert sorted(set(log)) == list(range(len(whole.keys)))
    assert [layer for i, layer in enumerate(log) if layer not in log[:i]] == sorted(set(log))
    assert past.get_seq_length() == whole.tokens + len(query())
    assert not any(module._forward_pre_hooks for module in engine.model.modules())


def test_a_decoders_marks_serve():
    engine = engine_of("llama")
    (whole,) = engine.prefill([documents()[0]])
    blob = encode(whole, None)
    decoder = BlobDecoder(blob, dtype=engine.model.dtype)
    pieces = [[blob[s.offset : s.end] for s in row] for row in decoder.info.segments]
    pending = decoder.submit([(chunk, parts, None) for chunk, parts in enumerate(pieces)])
    logits, _ = engine.forward_when_ready(decoder.cache, pending.layers, query(), logits=1)
    pending.wait()
    expected = engine.forward(engine.past_key_values(decoder.cache), query(), whole.tokens, logits=1)
    assert torch.equal(logits, expected)


def test_what_must_be_moved_or_cut_first_is_refused():
    engine = engine_of("llama")
    (whole,) = engine.prefill([documents()[0]])
    with pytest.raises(ArgumentError, match="while it is decoded"):
        engine.forward_when_ready(positions_off(whole), [], query())
    half = KVCache([k.half() for k in whole.keys], [v.half() for v in whole.values], whole.meta, whole.token_ids)
    with pytest.raises(ArgumentError, match="while it is decoded"):
        engine.forward_when_ready(half, [], query())


def test_a_layer_that_no_module_names_is_waited_for_at_once():
    model, log = make_model(config_of("llama")), []

    class Noted:
        def hold(self):
            log.append("held")

    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = None
    with held(model, [Noted(), Noted()]):
        assert log == ["held", "held"]
