"""Both halves of the connector without vLLM: a tiny scheduler's steps, real loads, and pages that a reference fills."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from kvwire.controller import Goal
from kvwire.engines.vllm import loading, working
from kvwire.engines.vllm.counting import Counts
from kvwire.engines.vllm.loading import PageLoader, without_weights
from kvwire.engines.vllm.opening import ConnectorSettings
from kvwire.engines.vllm.pages import BlockTable, StridedPages, slots_of
from kvwire.engines.vllm.scheduling import ConnectorScheduler
from kvwire.engines.vllm.working import ConnectorWorker
from kvwire.errors import ArgumentError, CorruptError, MismatchError, NotFoundError
from kvwire.reuse import kvlink, link
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.settings import LoadSettings
from kvwire.transport import LinkSettings
from kvwire.vllm import Choice, request_body

from .halves import BLOCK, QUESTION, Halves, check, damage


@pytest.fixture
def halves(told):
    with closing(Halves(told)) as made:
        yield made


def expected(told, names, level=1):
    return link([told.corpus.decode(name, level, dtype=torch.float32) for name in names])


@pytest.mark.parametrize("names", ["abc", "cba", "b"])
@pytest.mark.parametrize("level", [0, 2])
def test_linked_documents_lie_in_the_pages(halves, told, names, level):
    bad, blocks, said, promised = halves.load(halves.body(names, level))
    cache = expected(told, names, level)
    assert (bad, promised) == (set(), cache.tokens)
    assert said["promised_tokens"] == cache.tokens
    check(halves, blocks, cache, 0, cache.tokens)
    if rest := -cache.tokens % BLOCK:
        after = halves.pages(blocks, cache.tokens, cache.tokens + rest)
        assert not any(side.any() for layer in after for side in layer)


@pytest.mark.parametrize("computed", [16, 144, 160, 240])
def test_what_vllm_has_is_not_loaded_again(halves, told, computed):
    bad, blocks, _, promised = halves.load(halves.body("abc"), computed)
    cache = expected(told, "abc")
    assert (bad, promised) == (set(), cache.tokens - computed)
    check(halves, blocks, cache, computed, cache.tokens)
    before = halves.pages(blocks, 0, computed)
    assert not any(side.any() for layer in before for side in layer)


def test_the_end_that_fills_no_block_is_kept(halves, told, monkeypatch):
    body, cache = halves.body("abc"), expected(told, "abc")
    halves.load(body)
    monkeypatch.setattr(PageLoader, "load", None)  # nothing is asked of the store
    for view in halves.views:
        view.zero_()
    whole = cache.tokens // BLOCK * BLOCK
    bad, blocks, _, promised = halves.load(body, whole)
    assert (bad, promised) == (set(), cache.tokens - whole)
    check(halves, blocks, cache, whole, cache.tokens)


def test_the_ends_that_are_kept_are_bounded_by_their_bytes(told, monkeypatch):
    cache, load, loaded = expected(told, "abc"), PageLoader.load, []
    whole = cache.tokens // BLOCK * BLOCK
    monkeypatch.setattr(working, "_MOST_TAIL_BYTES", int(2.5 * cache.slice(whole, cache.tokens).nbytes))
    monkeypatch.setattr(
        PageLoader, "load", lambda loader, names, *given: loaded.append(names) or load(loader, names, *given)
    )
    with closing(Halves(told)) as halves:
        orders = ["abc", "acb", "bac", "bca", "cab", "cba"]  # as long as each other, and so are their ends
        for names in orders:
            halves.load(halves.body(names))
        del loaded[:]
        for names in reversed(orders):
            halves.load(halves.body(names), whole)
    assert [names[-1] for names in loaded] == [names[-1] for names in orders[3::-1]]


def test_a_damaged_chunk_makes_its_blocks_and_those_behind_bad(halves, told):
    body, cache = halves.body("abc"), expected(told, "abc")
    damage(told, "b", 1)  # tokens 182 to 214
    bad, blocks, said, _ = halves.load(body)
    assert bad == set(blocks[182 // BLOCK : -(-cache.tokens // BLOCK)])
    assert said["promised_tokens"] == cache.tokens
    check(halves, blocks, cache, 0, 182 // BLOCK * BLOCK)


def test_a_lost_blob_makes_all_behind_it_bad(halves, told):
    body = halves.body("ab")
    for path in told.root.rglob("*.kvw"):
        path.unlink()
    bad, blocks, _, promised = halves.load(body)
    assert bad == set(blocks[: -(-promised // BLOCK)])


LISTS = [list(range(20, 0, -1)), [*[0] * 15, 45, 44, 43, 42, 41]]
"""Of the layers that see all, and of those whose window has left the first 15 blocks."""


@pytest.fixture
def windowed(told):
    with closing(Halves(told, tables=[BlockTable((0,), BLOCK), BlockTable((1,), BLOCK, is_whole=False)])) as made:
        yield made


def test_blocks_that_a_window_has_left_are_not_written(windowed, told):
    cache, body = expected(told, "abc"), windowed.body("abc")
    for computed in (0, 304):  # the second time from memory
        for view in windowed.views:
            view.zero_()
        bad, _, said, promised = windowed.load(body, computed, LISTS)
        assert (bad, windowed.failed, promised, said["lost_tokens"]) == (set(), set(), cache.tokens - computed, 0)
        pages = StridedPages(windowed.views, [spec.key_dim for spec in told.corpus.meta.layers])
        for layer, start in ((0, computed), (1, max(computed, 15 * BLOCK))):
            keys, values = pages.read(layer, slots_of(LISTS[layer], BLOCK, start, cache.tokens))
            assert torch.allclose(keys, cache.keys[layer][:, start : cache.tokens], atol=2e-5, rtol=0)
            assert torch.equal(values, cache.values[layer][:, start : cache.tokens])
        assert not windowed.views[1][:41].any()


def test_a_part_of_what_windows_need_is_nothing(windowed, told):
    body = windowed.body("abc")
    damage(told, "b", 1)
    bad, _, said, promised = windowed.load(body, 0, LISTS)
    assert (bad, windowed.failed) == (set(), {"request 1"})
    assert (said["loaded_tokens"], said["lost_tokens"]) == (0, promised)


def test_blocks_longer_than_those_of_the_pages_hold_the_same_tokens(told):
    with closing(Halves(told, tables=[BlockTable((0, 1), 4 * BLOCK)])) as halves:
        cache, tables = expected(told, "abc"), [3, 9, 1, 12, 5]
        bad, *_ = halves.load(halves.body("abc"), 0, [tables])
        assert bad == set()
        check(halves, [4 * block + at for block in tables for at in range(4)], cache, 0, cache.tokens)
        damage(told, "b", 1)  # tokens 182 to 214
        bad, *_ = halves.load(halves.body("ab", 0) | {}, 0, [tables])
        assert bad == {1, 12}


def test_the_last_token_of_a_prompt_without_a_question_is_computed(windowed, told):
    """vLLM drops what the window of the token behind all that is promised has left, and that token is computed anew."""
    body = windowed.body("abc")
    prompt = body["prompt"][: -len(QUESTION)]
    for length in (len(prompt), len(prompt) - 7):
        assert windowed.promise(body | {"prompt": prompt[:length]})[1] == length - 1
        bad, _, said, _ = windowed.load(body | {"prompt": prompt[:length]}, 0, LISTS)
        assert (bad, said["loaded_tokens"], said["lost_tokens"]) == (set(), length - 1, 0)


def test_a_load_is_begun_once_for_each_time_that_its_pages_are_there(halves):
    """A load that brought nothing leaves vLLM where it was before: promised again, it would never end."""
    name, promised = halves.promise(halves.body("ab"))
    assert halves.scheduling.promised(name, 0) == promised  # nothing was begun yet
    halves.scheduling.allocated(name, [list(range(1, 40))], promised)
    assert halves.scheduling.promised(name, 0) == 0
    assert halves.scheduling.promised(name, 0, 1) == promised
    halves.scheduling.allocated(name, [list(range(1, 40))], promised)
    assert halves.scheduling.promised(name, 0, 1) == 0
    assert [(load.start, load.stop) for load in halves.scheduling.take()] == [(0, promised)] * 2


def test_blobs_that_are_lost_after_they_were_read_make_all_bad(halves, told):
    halves.load(halves.body("abc"))
    body = halves.body("bca", 2)
    for path in told.root.rglob("*.kvw"):
        path.unlink()
    bad, blocks, _, promised = halves.load(body)
    assert bad == set(blocks[: -(-promised // BLOCK)])


def test_what_comes_after_the_deadline_is_bad(told):
    """At a kilobyte a second not even a header comes in a fifth of a second."""
    body = request_body(told.corpus, Choice(("a", "b"), deadline_s=0.2), QUESTION)
    with closing(Halves(told, link=LinkSettings(1000.0))) as halves:
        bad, blocks, said, promised = halves.load(body)
        assert bad == set(blocks[: -(-promised // BLOCK)])
        assert said["promised_tokens"] == promised == 247
        assert not any(view.any() for view in halves.views)


@pytest.mark.parametrize("salt", [None, "", "kvwire", "0" * 64])
def test_a_request_with_another_salt_gets_nothing_and_is_told(halves, salt):
    body = halves.body("ab")
    bad, _, said, promised = halves.load(body | {"cache_salt": salt})
    assert (bad, promised) == (set(), 0)
    assert f'send "cache_salt": "{body["cache_salt"]}"' in said["refused"]


@pytest.mark.parametrize("names", [["absent"], ["absent", "a"]])
def test_a_document_that_is_not_in_the_catalog_is_named(halves, names):
    said = {"documents": names, "level": 1}
    _, _, report, promised = halves.load(halves.body("a") | {"kv_transfer_params": {"kvwire": said}})
    assert promised == 0
    assert report["refused"].startswith("document 'absent' is not in the catalog: encode it")


def test_requests_that_name_no_documents_are_none_of_ours(halves):
    for params in (None, {}, {"other": 1}):
        name, promised = halves.promise({"prompt": [1, 2, 3], "kv_transfer_params": params})
        assert promised == 0
        assert halves.scheduling.end(name) is None


def test_a_prompt_of_another_text_is_promised_as_far_as_it_agrees(halves, told):
    body = halves.body("cab")
    prompt = [*body["prompt"][:80], 255, *body["prompt"][81:]]
    _, _, said, promised = halves.load(body | {"prompt": prompt})
    assert promised == 80
    assert "from token 80 on the prompt is not the text of document 'a'" in said["trouble"]
    _, _, said, promised = halves.load(body | {"prompt": prompt[:70]})  # shorter than its documents
    assert promised == 69  # vLLM computes the last one


def test_documents_behind_a_bos_are_told(halves):
    body = halves.body("cab")
    _, _, said, promised = halves.load(body | {"prompt": [255, *body["prompt"]]})
    assert promised == 0
    assert "behind the prompt's first token, 255" in said["trouble"]


def test_a_catalog_that_fails_or_is_late_leaves_the_prompt_to_vllm(halves, told, monkeypatch):
    def broken(*_):
        msg = "the catalog is damaged"
        raise CorruptError(msg)

    body = halves.body("ab")
    monkeypatch.setattr(Corpus, "find", broken)
    _, _, said, promised = halves.load(body)
    assert (promised, said["trouble"]) == (0, "the catalog is damaged")
    late = ConnectorScheduler(told.corpus, patience_s=1.0, clock=iter([0.0, 0.5, 2.0, 2.0]).__next__)
    with closing(late):
        monkeypatch.setattr(late._pool, "submit", lambda *_: Future())
        late.begin("late", body["kv_transfer_params"], body["prompt"], body["cache_salt"])
        assert late.promised("late", 0) is None
        assert late.promised("late", 0) == 0
        assert "did not answer within 1 s" in late.end("late")["kvwire"]["trouble"]


def test_a_stand_in_for_a_model_computes_nothing(told):
    stand_in = without_weights(told.corpus, torch.float32)
    for call in (
        lambda: stand_in.prefill([[1]]),
        lambda: stand_in.extend(None, [1]),
        lambda: stand_in.past_key_values(None),
        lambda: stand_in.forward(None, [1], 0),
        lambda: stand_in.vocabulary_size,
    ):
        with pytest.raises(ArgumentError, match="no weights here"):
            call()


def test_idle_steps_wait_for_loads_and_only_while_there_are_some(told):
    """A step that computes nothing leaves Python to loads; it goes on at once where one has ended or none is there."""
    halves = Halves(told, link=LinkSettings(1e9, 0.05))
    with closing(halves.working):
        started = time.monotonic()
        halves.working.wait(20.0)  # nothing is under way
        name, promised = halves.promise(request_body(told.corpus, Choice(("a",), level=1), QUESTION))
        halves.scheduling.allocated(name, [list(range(1, 64))], promised)
        halves.working.start(halves.scheduling.take())
        began = time.monotonic()
        halves.working.wait(0.02)
        assert time.monotonic() - began >= 0.02
        assert not halves.working.collect().requests
        halves.working.wait(20.0)
        assert halves.working.collect().requests
        halves.working.wait(20.0)
        assert time.monotonic() - started < 15.0


def test_pages_come_before_loads(told):
    working = ConnectorWorker(PageLoader(told.corpus, torch.float32))
    with closing(working):
        views = [torch.zeros(4, 2, BLOCK, 8)]
        with pytest.raises(MismatchError, match="pages of 1 layers"):
            working.register(StridedPages(views, [4]), told.corpus.meta)


@pytest.mark.parametrize(
    ("extra", "say"),
    [
        ({}, "name the store"),
        ({"store": ""}, "name the store"),
        ({"store": 3}, "store is a text"),
        ({"store": "file:///x", "tennant": "me"}, "has no 'tennant'; it may have .*tenant"),
        ({"store": "file:///x", "patience_s": 0}, "patience_s is a number"),
        ({"store": "file:///x", "link_bound": 2}, "link_bound is a share"),
        ({"store": "file:///x", "outcomes": "here"}, "outcomes is an absolute path"),
        ({"store": "file:///x", "max_kl": "much"}, "max_kl is a KL divergence in nats"),
    ],
)
def test_settings_that_are_wrong_are_told(extra, say):
    with pytest.raises(ArgumentError, match=say):
        ConnectorSettings.read(extra)


def test_settings_open_the_corpus_of_what_vllm_serves(told, tmp_path):
    settings = ConnectorSettings.read({"store": f"file://{told.root}"})
    assert settings.corpus("tiny").meta.config_digest() == told.corpus.meta.config_digest()
    named = ConnectorSettings.read({"store": f"file://{told.root}", "model": "eeeeeeee", "link": "50mbit,5ms"})
    with closing(named.loader(named.corpus("somewhere/else"), torch.bfloat16)) as loader:
        assert loader._engine.dtype == torch.bfloat16
    with pytest.raises(NotFoundError, match="no record of model 'somewhere/else'"):
        settings.corpus("somewhere/else")


def test_kernels_and_the_profile_are_made_ready_before_the_first_load(told):
    corpus = Corpus.open(told.corpus.catalog.store)
    with PageLoader(corpus, torch.float32) as loader:
        (thread,) = loader._runner.warming._threads._started
        thread.join(60)
        assert not thread.is_alive()
        (profile,) = told.root.rglob("*.kvp")
        profile.unlink()
        loaded = loader.load(["c"], [told.tokens["c"]], Goal(objective="earliest"))
    assert loaded.tokens == len(told.tokens["c"])


@pytest.mark.parametrize("has_profile", [True, False])
def test_loads_that_give_nothing_begin_again_what_is_not_ready(told, monkeypatch, has_profile):
    """Kernels are made ready once; the profile is looked for until it is there."""
    begun = []
    for name in ("warm_up_decoding", "profile_in_use"):
        real = getattr(loading, name)
        monkeypatch.setattr(loading, name, lambda *given, real=real, name=name: (begun.append(name), real(*given))[1])
    if not has_profile:
        next(told.root.rglob("*.kvp")).unlink()
    told.corpus.catalog.store.delete(told.corpus.find("c").blob_key)
    with PageLoader(Corpus.open(told.corpus.catalog.store), torch.float32) as loader:
        for _ in range(3):
            for thread in loader._runner.warming._threads._started:
                thread.join(60)
            assert loader.load(["c"], [told.tokens["c"]], Goal(deadline_s=0.1)).tokens == 0
        for thread in loader._runner.warming._threads._started:
            thread.join(60)
    assert begun == ["warm_up_decoding", "profile_in_use"] + 3 * (not has_profile) * ["profile_in_use"]


@pytest.mark.parametrize("settings", [LoadSettings(layout=kvlink(1)), LoadSettings(system=(1, 2))])
def test_what_is_computed_in_prompts_needs_a_model(told, settings):
    with pytest.raises(ArgumentError, match=r"leave layout and system out of the settings, or open the model"):
        PageLoader(told.corpus, torch.float32, settings=settings)


def test_silence_of_the_store_is_waited_out(told):
    """Nothing here can be computed meanwhile: a chunk is let go of only where it cannot be had."""
    with PageLoader(told.corpus, torch.float32, settings=LoadSettings(patience_s=7.0)) as loader:
        assert loader._runner.controls.stall_s == 7.0


def test_what_is_loaded_and_lost_is_counted(told):
    counts = Counts()
    with closing(Halves(told, counts=counts)) as halves:
        damage(told, "b", 1)  # tokens 182 to 214
        halves.load(halves.body("abc"))
        found = counts.take()
        assert found.pop("loaded_bytes") > 0
        assert found == {"loads": 1, "loaded_tokens": 182, "lost_tokens": 311 - 182}
        assert counts.take() == {}


def test_a_lost_first_chunk_ends_its_own_load_alone(told):
    """What begins with it promises nothing then; loads beside it go on."""
    damage(told, "a", 0)
    link, asked = LinkSettings(bandwidth_bytes_s=2e6, rtt_s=0.01), Goal(objective="earliest", floor=1, ceiling=1)
    with closing(PageLoader(told.corpus, torch.float32, link=link)) as loader, ThreadPoolExecutor(8) as pool:
        loads = [(name, pool.submit(loader.load, [name], [told.tokens[name]], asked, 1)) for name in "ab" * 12]
        found = [(name, load.result()) for name, load in loads]
    for name, loaded in found:
        assert loaded.tokens == (0 if name == "a" else len(told.tokens[name]))
        assert not any("steering" in trouble for trouble in loaded.troubles)
