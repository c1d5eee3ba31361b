"""The whole runtime with an engine that is written in the tests: what the front needs of one, and nothing else."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import isfunction

import numpy as np
import pytest
import torch

from kvwire import controller as ctl
from kvwire.codec import Profile, StatisticsBuilder, decode, encode, fit_profile, inspect
from kvwire.engines.base import Engine
from kvwire.engines.calibration import gather_gradients
from kvwire.engines.testing import EngineConformance
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.reuse import link
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import Reference, calibrate_error, mean_kl
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore

from .answers import troubles
from .tiny_engine import VOCABULARY, TinyEngine

QUESTION = [3, 1, 4, 1, 5]
COSTS = ctl.CostModel(ctl.PrefillCost(0.002, 0.0005), ctl.DecodeCost(0.0005, 1e-5))


def text(seed, tokens):
    """Token ids of a text in which what was said comes again, so that there is something to learn."""
    draw, out = random.Random(seed), [seed]
    while len(out) < tokens:
        out.append((3 * out[-1] + draw.choice([0, 0, 0, 1])) % VOCABULARY)
    return out


TEXTS = {"first": text(1, 300), "second": text(2, 420)}


@pytest.fixture(scope="module")
def engine():
    return TinyEngine()


@pytest.fixture(scope="module")
def corpus(engine):
    corpus = Corpus(engine, MemoryStore(), coding=Coding(chunk_tokens=128))
    done = list(corpus.encode([Document(name, tuple(ids)) for name, ids in TEXTS.items()]))
    assert [each.info.chunks for each in done] == [3, 4]
    return corpus


class TestTinyEngine(EngineConformance):
    @pytest.fixture
    def engine(self):
        return TinyEngine()


def test_a_profile_is_fitted_and_calibrated_without_statistics(engine, corpus):
    assert engine.statistics(list(TEXTS.values())) is None
    profile = corpus.profile()
    assert isinstance(profile, Profile)
    assert profile.table is None
    assert profile.notes["weighted"] == 0
    scale, exponent = profile.error_to_kl
    assert scale > 0
    assert 0.5 <= exponent <= 2
    assert profile.notes["kl_low"] <= 1 <= profile.notes["kl_high"]


def test_caches_alone_give_a_profile_that_is_not_calibrated_before_an_engine_is_there(engine):
    profile = fit_profile(engine.prefill(list(TEXTS.values())))
    assert profile.error_to_kl is None
    assert calibrate_error(engine, profile, list(TEXTS.values())).error_to_kl is not None


class Weighing(TinyEngine):
    """What tells of errors, from public parts alone."""

    def cache_gradients(self, cache, token_ids, *, seed=0):
        past = [
            (key.clone().requires_grad_(), value.clone().requires_grad_()) for key, value in self.past_key_values(cache)
        ]
        leaves = [leaf for pair in past for leaf in pair]
        predicted = self.forward(past, token_ids, cache.meta.offset + cache.tokens).log_softmax(-1)
        drawn = torch.multinomial(predicted.detach().exp(), 1, generator=torch.Generator().manual_seed(seed))
        found = torch.autograd.grad(predicted.gather(1, drawn).sum() / len(token_ids) ** 0.5, leaves)
        return replace(cache, keys=list(found[::2]), values=list(found[1::2]))

    def statistics(self, documents, *, tokens=True, sensitivity=True):  # noqa: ARG002 - it knows nothing of tokens
        builder = StatisticsBuilder(self.meta)
        for layer, weights in enumerate(self._layers):
            builder.set_output(layer, weights["o"].T)
        self.seen = builder
        for ids in documents:
            self.prefill([ids])
        self.seen = None
        assert gather_gradients(self, documents, builder)
        return builder.build()

    def watch(self, layer, query):
        if getattr(self, "seen", None) is not None:
            self.seen.add_queries(layer, query)


def test_an_engine_of_ones_own_weighs_errors_with_public_parts(engine):
    """Bits at the same error of the answers' logits, against caches alone: a random model has little to gain."""
    weighing, texts = Weighing(), [text(seed, 400) for seed in range(3, 9)]
    statistics = weighing.statistics(texts)
    assert all(metric is not None for metric in (*statistics.query_metric, *statistics.value_metric))
    assert len(statistics.gradients) == len(statistics.fisher) == 4
    profile = fit_profile(weighing.prefill(texts), statistics)
    assert profile.notes["weighted"] == profile.notes["gradients"] == 1
    unweighted = fit_profile(weighing.prefill(texts))
    assert unweighted.notes["gradients"] == 0
    bits = [kl_bits(weighing, each) for each in (profile, unweighted)]
    assert bits[0] < 1.05 * bits[1]
    assert profile.groups[0].metric[0].tolist() != unweighted.groups[0].metric[0].tolist()


def kl_bits(engine, profile):
    """Bits of unseen documents where the KL divergence is 1e-3, straight between levels on logarithmic axes."""
    rows = []
    for seed in range(20, 26):
        context, rest = text(seed, 400)[:300], text(seed, 400)[300:]
        (cache,) = engine.prefill([context])
        exact, blob = engine.forward(engine.past_key_values(cache), rest, 300), encode(cache, profile)
        kls = [
            mean_kl(exact, engine.forward(engine.past_key_values(decode(blob, level, profile)), rest, 300))
            for level in range(5)
        ]
        rows.append([[level.bits_per_element, kl] for level, kl in zip(inspect(blob).levels, kls, strict=True)])
    bits, kls = np.log(np.array(rows).mean(0)).T
    return float(np.exp(np.interp(-np.log(1e-3), -kls, bits)))


@pytest.mark.parametrize("order", [("first",), ("first", "second"), ("second", "first")])
def test_linked_documents_are_loaded_and_answered_from(engine, corpus, order):
    reference = Reference.of(engine, [TEXTS[name] for name in order], QUESTION, 6)
    with Loader(engine, corpus, settings=LoadSettings(quality_floor=4)) as loader:  # costs are measured
        answer = loader.ask(order, QUESTION, tokens=6)
    kl, agreement = reference.compare(engine, answer.prompt.cache)
    assert kl < 1e-3
    assert agreement == 1.0
    assert answer.tokens[:5] == reference.tokens[-5:]
    assert answer.text == ""
    assert "tensor(" not in repr(answer)
    assert not troubles(answer.misses)


def test_all_methods_are_called_from_one_thread_whoever_asks(corpus):
    """But for ``synchronize``, which a second thread that decodes calls, too."""
    callers = defaultdict(set)

    class Watched(TinyEngine):
        has_tokenizer = True

        def detokenize(self, token_ids, **_):
            return str(token_ids)

        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if not isfunction(getattr(Engine, name, None)):
                return found

            def called(*args, **named):
                callers[name].add(threading.current_thread().name)
                return found(*args, **named)

            return called

    engine = Watched()
    watched = Corpus(engine, corpus.catalog.store)
    with Loader(engine, watched, costs=COSTS, settings=LoadSettings(compute_workers=2)) as loader:
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda name: loader.ask([name], QUESTION, tokens=2), TEXTS))
        assert all(answer.text == str(list(answer.tokens)) for answer in answers)
    assert {"allocate", "forward", "detokenize", "past_key_values"} <= set(callers)
    [computing] = callers["forward"]
    assert {name: each for name, each in callers.items() if each != {computing}}.keys() <= {"synchronize"}


def test_lost_blobs_are_computed_from_their_texts(engine):
    corpus = Corpus(engine, MemoryStore())
    for each in corpus.encode([Document(name, tuple(ids)) for name, ids in TEXTS.items()]):
        corpus.catalog.store.delete(each.entry.blob_key)
    exact = link(engine.prefill(list(TEXTS.values())))
    with Loader(engine, corpus) as loader:
        answer = loader.ask(list(TEXTS), QUESTION)
    assert {decision.action for decision in answer.decisions} == {"recompute"}
    for ours, theirs in zip(answer.prompt.cache.keys, exact.keys, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_what_an_engine_lacks_is_told(engine):
    with pytest.raises(NotFoundError, match="token ids"):
        engine.tokenize("a text")
    with pytest.raises(ArgumentError, match="prefix_layers=0"):
        list(
            Corpus(engine, MemoryStore(), coding=Coding(prefix_layers=1)).encode([Document("a", tuple(TEXTS["first"]))])
        )
