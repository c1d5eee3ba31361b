"""Forward passes that another thread stops, with real models."""

from __future__ import annotations

import threading

import pytest
import torch

from kvwire.engines.base import PassStoppedError
from kvwire.engines.transformers.text import layers_of

from .families import FAMILIES, cache_error, engine_of, tokens

TOLERANCE = 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_is_stopped_leaves_no_trace(family):
    engine = engine_of(family)
    assert engine.can_stop
    before, new = engine.extend(None, tokens(21, 1)), tokens(13, 2)
    whole, stop = engine.extend(before, new), threading.Event()
    with engine.stoppable(stop):
        assert cache_error(engine.extend(before, new), whole) < TOLERANCE
        stop.set()
        with pytest.raises(PassStoppedError):
            engine.extend(before, new)
    assert cache_error(engine.extend(before, new), whole) < TOLERANCE
    assert not any(layer._forward_pre_hooks for layer in layers_of(engine.model))


def test_it_stops_between_layers_where_it_is():
    engine, stop, run = engine_of("llama"), threading.Event(), []

    def ran(number):
        run.append(number)
        if number == 0:
            setter = threading.Thread(target=stop.set)
            setter.start()
            setter.join()

    layers = layers_of(engine.model)
    hooks = [layer.register_forward_hook(lambda *_, at=at: ran(at)) for at, layer in enumerate(layers)]
    try:
        with engine.stoppable(stop), pytest.raises(PassStoppedError):
            engine.extend(None, tokens(13, 2))
    finally:
        for hook in hooks:
            hook.remove()
    assert run == [0]


def test_a_hook_that_is_taken_away_meanwhile_may_be_called_as_others_are(monkeypatch):
    engine = engine_of("llama")
    (layer, *_), stop = layers_of(engine.model), threading.Event()
    with engine.stoppable(stop):
        (hook,) = layer._forward_pre_hooks.values()
        assert hook(layer, (torch.zeros(1),)) is None
        stop.set()
        with pytest.raises(PassStoppedError):
            hook(layer, (torch.zeros(1),))
    assert engine.can_stop
    monkeypatch.setattr(engine.model, "_compiled_call_impl", engine.model._call_impl)  # as ``Module.compile`` does
    assert not engine.can_stop


def test_other_threads_run_on():
    engine, stop, found = engine_of("llama"), threading.Event(), []
    stop.set()
    whole = engine.extend(None, tokens(13, 2))
    with engine.stoppable(stop):
        other = threading.Thread(target=lambda: found.append(engine.extend(None, tokens(13, 2))))
        other.start()
        other.join()
    assert cache_error(found[0], whole) < TOLERANCE
