"""Prompts that are found in the store by their beginning, kept with their answers, and sessions that grow by turns."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import threading

import pytest

from kvwire import Chat
from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.controller.learning import PrefillEstimator
from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import ArgumentError, StorageError
from kvwire.runtime import runner
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.saving import Saver
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore, collect, forget

from ..store.conftest import DAY, AgedStore
from ..store_wrappers import CountingStore, StoreWrapper
from .tiny_engine import TinyEngine

TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
NEVER = CostModel(PrefillCost(10.0, 1.0), DecodeCost(0.0005, 1e-5))
"""Computing takes so long that a busy machine fetches, too."""
SYSTEM = "You tell of the bell of Ashcombe and of the toll gate, in one sentence, and of nothing else at all. " * 4
CHAT = Chat(system=SYSTEM)


class Failing(StoreWrapper):
    """Refuses to write keys that hold a word, and to read those that hold another."""

    word = unread = ""

    def _do(self, request, call):
        word = self.word if request.method in ("put", "create", "replace") else self.unread
        if word and word in request.key:
            msg = "the disk is full"
            raise StorageError(msg)
        return call(request.data)


class SlowToMark(StoreWrapper):
    """Writes the first mark of a last use only when it is let."""

    def __init__(self, inner):
        super().__init__(inner)
        self.begun, self.let = threading.Event(), threading.Event()

    def _do(self, request, call):
        if request.method == "put" and "/catalog/used/" in request.key:
            self.begun.set()
            assert self.let.wait(60)
        return call(request.data)


@pytest.fixture(autouse=True)
def costs_stay(monkeypatch):
    """As they were given, however quick passes really are."""
    monkeypatch.setattr(PrefillEstimator, "add", lambda *_: None)


@pytest.fixture(scope="module")
def chatting(small):
    tokenizer = copy.deepcopy(small.engine.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return TransformersEngine(small.engine.model, tokenizer, model_id=small.engine.meta.model_id)


@pytest.fixture
def corpus(small, chatting):
    return filled(small, chatting)


def filled(small, engine, store=None, coding=None, **whose):
    made = Corpus(engine, store or MemoryStore(), coding=coding, **whose)
    made.set_profile(small.profile)
    return made


@pytest.fixture(scope="module")
def ids(small):
    return tuple(next(iter(small.tokens.values()))[:300])


def loader(engine, corpus, **settings):
    return Loader(engine, corpus, costs=NEVER, settings=LoadSettings(**settings))


def documents(corpus):
    return {each.document_id: each for each in corpus.catalog.documents(corpus.config)}


def full(engine, token_ids):
    return engine.forward(None, [*engine.opening_tokens, *token_ids], 0, logits=1)


def test_a_prompt_begins_with_what_is_stored(corpus, chatting, ids):
    list(corpus.encode([Document("text", ids)], index=("kvwire",)))
    with loader(chatting, corpus, quality_floor=4) as made:
        whole = made.ask_prompt([*ids, 7, 8, 9])
        assert (whole.reused.document, whole.reused.loaded, whole.reused.computed) == ("text", 300, 3)
        assert mean_kl(full(chatting, [*ids, 7, 8, 9]), whole.logits[None]) < 3e-3
        part = made.ask_prompt([*ids[:100], 7, 8, 9])
        assert (part.reused.loaded, part.reused.computed, part.prompt.tokens) == (100, 3, (100,))
        assert mean_kl(full(chatting, [*ids[:100], 7, 8, 9]), part.logits[None]) < 3e-3
        same = made.ask_prompt(ids)  # the last token is run in any case
        assert (same.reused.loaded, same.reused.computed) == (299, 1)
        assert (same.reused.saved, len(documents(corpus))) == ("", 1)


@pytest.mark.parametrize("repair", ["all", 0.15, "auto"])
def test_the_first_part_of_a_longer_document_is_repaired_as_a_whole_one_is(corpus, chatting, ids, repair):
    list(corpus.encode([Document("text", ids)], index=("kvwire",)))
    with loader(chatting, corpus, repair=repair) as made:
        answer = made.ask_prompt([*ids[:100], 7, 8, 9])
    assert answer.reused.loaded == 100
    if repair == "all":
        assert mean_kl(full(chatting, [*ids[:100], 7, 8, 9]), answer.logits[None]) < 1e-6


def two_uses(small, chatting, ids):
    """A loader that has used a second prompt while the first's use is being written."""
    store = SlowToMark(MemoryStore())
    corpus = filled(small, chatting, store)
    for name, text in (("prompts/1", ids), ("prompts/2", ids[7:])):
        list(corpus.encode([Document(name, text)], index=("kvwire",)))
    made = loader(chatting, corpus)
    made.ask_prompt([*ids, 7])
    assert store.begun.wait(60)
    made.ask_prompt([*ids[7:], 7])
    return store, corpus, made


def test_uses_while_the_last_are_written_down_are_written_when_the_loader_closes(small, chatting, ids):
    store, corpus, made = two_uses(small, chatting, ids)
    threading.Timer(0.2, store.let.set).start()
    made.close()
    space = corpus.catalog.keys(corpus.config)
    assert {*store.keys(space.last_uses)} == {space.last_use("prompts/1"), space.last_use("prompts/2")}


def test_a_hung_write_is_waited_for_once_and_closing_again_does_nothing(small, chatting, ids, monkeypatch):
    monkeypatch.setattr(runner, "_WRITING_S", 0.5)
    store, corpus, made = two_uses(small, chatting, ids)
    writing, waits = made._runner.writing, []
    wait = writing.result
    monkeypatch.setattr(writing, "result", lambda limit_s: (waits.append(limit_s), wait(limit_s))[1])
    made.close()
    assert waits == [0.5]
    store.let.set()
    wait(60)
    made.close()
    space = corpus.catalog.keys(corpus.config)
    assert {*store.keys(space.last_uses)} == {space.last_use("prompts/1")}


def test_a_prompt_of_which_nothing_is_stored_is_a_prefill(corpus, chatting, ids):
    with loader(chatting, corpus) as made:
        answer = made.ask_prompt(ids)
    assert (answer.reused.document, answer.reused.loaded, answer.reused.computed) == ("", 0, 300)
    assert mean_kl(full(chatting, ids), answer.logits[None]) < 1e-6
    assert not answer.bytes


@pytest.mark.parametrize(
    ("token_ids", "why"),
    [
        ((), "is empty"),
        ((5,), "two tokens at least"),
        ((5, 8192), "lie in 0 to 8191"),
        ((5, -1), "lie in 0 to 8191"),
        ((5, 1.5), "must be integers"),
        (range(5000), "model's window is 4096"),
    ],
)
def test_what_is_no_prompt_is_refused(corpus, chatting, token_ids, why):
    with loader(chatting, corpus) as made, pytest.raises(ArgumentError, match=why):
        made.ask_prompt(token_ids)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, None])
def test_an_answer_without_a_length_is_refused(corpus, chatting, ids, tokens):
    with loader(chatting, corpus) as made:
        asking = (
            lambda: made.ask(["a"], ids[:2], tokens=tokens),
            lambda: made.ask_prompt(ids, tokens=tokens),
            lambda: made.converse("anna", ids[:2], tokens=tokens),
        )
        for ask in asking:
            with pytest.raises(ArgumentError, match=f"a whole number from 1 on, got {tokens}"):
                ask()


def test_what_stands_around_documents_does_not_go_with_a_prompt(corpus, chatting, ids):
    with (
        loader(chatting, corpus, system=(5, 6)) as made,
        pytest.raises(ArgumentError, match="take no system text"),
    ):
        made.ask_prompt(ids)


def test_prompt_and_answer_are_kept_behind_what_they_begin_with(corpus, chatting, ids):
    list(corpus.encode([Document("system", ids)], index=("kvwire",)))
    with loader(chatting, corpus, quality_floor=4) as made:
        first = made.ask_prompt([*ids, 7, 8], tokens=5, save=True)
        saved = corpus.find(first.reused.saved)
        assert corpus.text(saved) == (*ids, 7, 8, *first.tokens)
        assert [part.tokens for part in saved.parts] == [300, 7]
        assert saved.parts[0].sha256 == corpus.find("system").sha256
        again = made.ask_prompt([*ids, 7, 8], tokens=5, save=True)
        assert (again.tokens, again.reused.saved) == (first.tokens, first.reused.saved)
        assert len(documents(corpus)) == 2
        more = made.ask_prompt([*ids, 7, 8, *first.tokens, 9], tokens=5, save=True)
        assert (more.reused.document, more.reused.computed) == (first.reused.saved, 1)
        branch = made.ask_prompt([*ids, 7, 8, *first.tokens[:2], 9], tokens=5, save=True)
        assert branch.reused.loaded == 304
        assert [part.tokens for part in corpus.find(branch.reused.saved).parts] == [300, 10]


def test_saved_rows_are_those_that_were_computed(corpus, chatting, ids):
    exact = filled_like(corpus, chatting, Coding(lossless=True))
    with loader(chatting, exact) as made:
        answer = made.ask_prompt(ids, tokens=6, save=True)
    kept = exact.decode(answer.reused.saved, "lossless")
    (whole,) = chatting.prefill([[*ids, *answer.tokens]])
    pairs = zip((*kept.keys, *kept.values), (*whole.keys, *whole.values), strict=True)
    assert all((ours - theirs).abs().max() < 1e-4 for ours, theirs in pairs)
    assert exact.read_header(exact.find(answer.reused.saved)).context_level is None


def filled_like(corpus, engine, coding):
    made = Corpus(engine, corpus.catalog.store, tenant="exact", coding=coding)
    made.set_profile(corpus.profile())
    return made


def test_rows_over_a_coarse_level_say_so_and_are_not_taken_for_finer_ones(corpus, chatting, ids):
    list(corpus.encode([Document("text", ids)], index=("kvwire",)))
    own = corpus.read_header(corpus.find("text")).levels[3].predicted_kl
    with loader(chatting, corpus, quality_ceiling=1, quality_floor=1) as made:
        first = made.ask_prompt([*ids, 7, 8], tokens=40, save=True)
        info = corpus.read_header(corpus.find(first.reused.saved))
        assert info.context_level == 1
        assert info.levels[3].predicted_kl > own
    prompt = [*ids, 7, 8, *first.tokens, 9]
    with loader(chatting, corpus, quality_floor=1) as made:
        assert made.ask_prompt(prompt).reused.loaded == 342
    for settings in ({"quality_floor": 3}, {"exact": True}):
        with loader(chatting, corpus, **settings) as made:
            answer = made.ask_prompt(prompt)
        assert (answer.reused.loaded, answer.expected_kl) == (0, 0.0)
        assert any("computed over level 1" in miss for miss in answer.misses)
        assert mean_kl(full(chatting, prompt), answer.logits[None]) < 1e-6


def test_a_store_that_fails_while_saving_costs_no_answer(small, chatting, ids):
    store = Failing(MemoryStore())
    corpus = filled(small, chatting, store)
    with loader(chatting, corpus) as made:
        store.word = ".kvw"
        answer = made.ask_prompt(ids, tokens=3, save=True)
        assert (len(answer.tokens), answer.reused.saved, documents(corpus)) == (3, "", {})
        assert "not saved: the disk is full" in answer.misses[-1]
        store.word = ""
        assert made.ask_prompt(ids, tokens=3, save=True).reused.saved


def test_an_index_that_fails_or_leads_astray_is_a_miss(small, chatting, ids):
    store = Failing(MemoryStore())
    corpus = filled(small, chatting, store)
    list(corpus.encode([Document("text", ids)], index=("kvwire",)))
    with loader(chatting, corpus) as made:
        store.unread = "catalog/prefix"
        answer = made.ask_prompt([*ids, 7])
        assert (answer.reused.loaded, len(answer.misses)) == (0, 1)
        assert "not looked up" in answer.misses[0]
        store.unread = ""
        for key in [key for key in store.keys("") if "catalog/prefix" in key]:
            store.put(key, b"{}")
        answer = made.ask_prompt([*ids, 7])
        assert (answer.reused.loaded, any("counts as a miss" in miss for miss in answer.misses)) == (0, True)
        assert mean_kl(full(chatting, [*ids, 7]), answer.logits[None]) < 1e-6


def test_without_a_profile_prompts_are_kept_bit_for_bit(chatting, ids):
    corpus = Corpus(chatting, MemoryStore())
    with loader(chatting, corpus) as made:
        first = made.ask_prompt(ids, tokens=3, save=True)
        more = made.ask_prompt([*ids, *first.tokens, 9], tokens=3, save=True)
    assert (more.reused.loaded, more.expected_kl) == (303, 0.0)
    assert [level.name for level in corpus.read_header(corpus.find(more.reused.saved)).levels] == ["lossless"]
    assert len(corpus.find(more.reused.saved).parts) == 2


def test_an_engine_that_gives_no_rows_computes_them_again(ids):
    engine = TinyEngine()
    corpus, prompt = Corpus(engine, MemoryStore()), [token % 50 for token in ids]
    with loader(engine, corpus) as made:
        first = made.ask_prompt(prompt, tokens=3, save=True)
        more = made.ask_prompt([*prompt, *first.tokens, 9], tokens=3, save=True)
    assert more.reused.loaded == 303
    assert corpus.text(corpus.find(more.reused.saved)) == (*prompt, *first.tokens, 9, *more.tokens)


def test_models_with_a_bos_find_what_was_saved(small, bos_engine, ids):
    corpus = Corpus(bos_engine, MemoryStore())
    with loader(bos_engine, corpus) as made:
        first = made.ask_prompt(ids, tokens=3, save=True)
        more = made.ask_prompt([*bos_engine.opening_tokens, *ids, *first.tokens, 9], save=True)
    assert (more.reused.loaded, more.reused.computed) == (303, 2)
    assert mean_kl(full(bos_engine, [*ids, *first.tokens, 9]), more.logits[None]) < 1e-6
    assert f"bos-{bos_engine.opening_tokens[0]}" in documents(corpus)


def test_tenants_and_models_share_nothing(small, chatting, bos_engine, ids):
    store = MemoryStore()
    with loader(chatting, filled(small, chatting, store, tenant="a")) as made:
        made.ask_prompt(ids, save=True)
        assert made.ask_prompt(ids).reused.loaded == 299
    for engine, tenant in ((chatting, "b"), (bos_engine, "a")):
        with loader(engine, Corpus(engine, store, tenant=tenant)) as made:
            assert made.ask_prompt(ids).reused.loaded == 0


@pytest.mark.parametrize("way", ["encode", "append", "turn"])
def test_what_encodes_reads_a_profile_once(small, chatting, ids, way):
    store = filled(small, chatting).catalog.store
    list(Corpus(chatting, store).encode([Document("text", ids)], index=("kvwire",)))
    counting = CountingStore(store)
    corpus = Corpus(chatting, counting)
    if way == "encode":
        list(corpus.encode([Document("other", ids[1:])]))
    elif way == "append":
        corpus.append("text", ids[:64])
    else:
        with loader(chatting, corpus, quality_floor=4) as made:
            assert made.ask_prompt([*ids, 7, 8, 9], save=True).reused.saved
    key = corpus.catalog.keys(corpus.config).profile(small.profile.digest)
    assert 0 < counting.tally("get", key).bytes <= len(small.profile.data)


def turns(engine, corpus, count, name="anna", **settings):
    with loader(engine, corpus, **settings) as made:
        return [made.converse(name, f"And what then, {turn}?", chat=CHAT, tokens=9) for turn in range(count)]


def test_a_turn_computes_only_what_is_new(corpus, chatting):
    answers = turns(chatting, corpus, 4, quality_floor=4)
    assert not answers[0].reused.loaded
    stored = 0
    for number, answer in enumerate(answers):
        said = len(answer.tokens) - (answer.tokens[-1] in chatting.end_tokens)
        assert answer.reused.loaded == stored
        stored += answer.reused.computed + said
        assert corpus.find("sessions/anna").tokens == stored if number == 3 else True
        assert number == 0 or answer.reused.computed < 30
    ids = corpus.text(corpus.find("sessions/anna"))
    asked = ids[: len(ids) - said]
    assert mean_kl(full(chatting, asked), answers[-1].logits[None]) < 3e-3
    head = len(chatting.render_chat(CHAT, "a").head)
    parts = corpus.find("sessions/anna").parts
    assert (parts[0].tokens, len(parts)) == (head, 5)


def test_sessions_share_their_system_text(corpus, chatting):
    turns(chatting, corpus, 1)
    (other,) = turns(chatting, corpus, 1, "bert")
    parts = [documents(corpus)[f"sessions/{name}"].parts[0].sha256 for name in ("anna", "bert")]
    assert (parts[0] == parts[1], other.reused.loaded > 100) == (True, True)


def test_a_session_has_the_tokens_of_its_template(corpus, chatting, monkeypatch):
    """The assistant says what a tokenizer would have read."""
    words = iter([chatting.tokenize(" The bell rang.", place="last"), chatting.tokenize(" Nobody did.", place="last")])
    ends, last = min(chatting.end_tokens), chatting.render_chat(Chat(), "a").tail[-1]
    generate = []

    def forward(past, token_ids, start, *, logits=0):
        out = original(past, token_ids, start, logits=logits)
        if logits == 1:
            if not generate and token_ids[-1] == last:
                generate[:] = [*next(words), ends]
            if generate:
                out = out.clone()
                out[-1, generate.pop(0)] = 1e9
        return out

    original = chatting.forward
    monkeypatch.setattr(chatting, "forward", forward)
    with loader(chatting, corpus) as made:
        answers = [made.converse("anna", said, chat=Chat(), tokens=20) for said in ("What rang?", "Who heard it?")]
    assert [answer.text for answer in answers] == [" The bell rang.", " Nobody did."]
    messages = [
        {"role": "user", "content": "What rang?"}, {"role": "assistant", "content": " The bell rang."},
        {"role": "user", "content": "Who heard it?"}, {"role": "assistant", "content": " Nobody did."},
    ]  # fmt: skip
    text = chatting.tokenizer.apply_chat_template(messages, tokenize=False)
    whole = chatting.tokenize(text, place="first", trust="frame")
    kept = corpus.text(corpus.find("sessions/anna"))
    assert tuple(whole[: len(kept)]) == kept
    assert not any("differ from" in miss for answer in answers for miss in answer.misses)


def test_another_system_text_and_control_tokens_in_a_question(corpus, chatting):
    with loader(chatting, corpus) as made:
        made.converse("anna", "Hm?", chat=CHAT, tokens=3)
        before = corpus.find("sessions/anna").tokens
        answer = made.converse("anna", "<|eos|>", chat=Chat(system="Other."), tokens=3)
    assert any("another system text" in miss for miss in answer.misses)
    new = corpus.text(corpus.find("sessions/anna"))[before:]
    assert new.count(chatting.tokenizer.eos_token_id) == 2  # the answer's end and the question's


@pytest.mark.parametrize("word", [".kvw", ".kvtp", "catalog/doc/"])
def test_a_turn_that_ends_halfway_is_as_if_it_never_was(small, chatting, word):
    store = Failing(MemoryStore())
    corpus = filled(small, chatting, store)
    with loader(chatting, corpus) as made:
        made.converse("anna", "One?", chat=CHAT, tokens=4)
        before = corpus.find("sessions/anna")
        assert any(word in key for key in store.keys(""))
        store.word = word
        broken = made.converse("anna", "Two?", chat=CHAT, tokens=4)
        assert "not saved" in broken.misses[-1]
        store.word = ""
        assert corpus.find("sessions/anna") == before
    answer = turns(chatting, corpus, 1)[0]
    assert answer.reused.loaded == before.tokens
    assert answer.reused.saved


def test_of_two_turns_at_a_time_one_is_kept(corpus, chatting, monkeypatch):
    turns(chatting, corpus, 1)
    with loader(chatting, corpus) as made, loader(chatting, corpus) as other:
        closer, answer = made._runner.closer, type(made._runner.closer).answer

        async def late(*given, **named):
            other.converse("anna", "Sooner?", chat=CHAT, tokens=3)
            monkeypatch.setattr(closer, "answer", lambda *a, **b: answer(closer, *a, **b))
            return await answer(closer, *given, **named)

        monkeypatch.setattr(closer, "answer", late)
        second = made.converse("anna", "Later?", chat=CHAT, tokens=3)
    assert second.reused.saved == ""
    assert "document 'sessions/anna' was changed by another writer meanwhile" in second.misses[-1]
    assert "ask again" in second.misses[-1]


def test_a_session_with_a_lost_part_goes_on_from_its_text(corpus, chatting):
    turns(chatting, corpus, 2)
    entry = corpus.find("sessions/anna")
    store = corpus.catalog.store
    store.delete([*corpus.catalog.blobs.of(entry)][1])
    answer = turns(chatting, corpus, 1)[0]
    assert (answer.reused.loaded, answer.reused.saved) == (0, "sessions/anna")
    whole = corpus.find("sessions/anna")
    assert (whole.tokens > entry.tokens, whole.parts) == (True, ())
    assert turns(chatting, corpus, 1)[0].reused.loaded == whole.tokens


def test_what_is_used_again_is_not_forgotten(small, chatting, ids):
    store = AgedStore()
    corpus = filled(small, chatting, store)
    list(corpus.encode([Document("text", ids)], index=("kvwire",)))
    with loader(chatting, corpus) as made:
        kept = made.ask_prompt([*ids, 7, 8, 9], save=True, tokens=4).reused.saved
        made.ask_prompt([*ids[:100], *ids[150:250], 5, 6], save=True, tokens=4)
    store.age(2 * DAY)
    with loader(chatting, corpus) as made:
        assert made.ask_prompt([*ids, 7, 8, 9, 9]).reused.document == kept
    assert forget(store, keep_bytes=0, named=False).documents == 1
    assert set(documents(corpus)) == {"text", kept}
    collect(store)
    with loader(chatting, corpus) as made:
        assert made.ask_prompt([*ids, 7, 8, 9, 9]).reused.document == kept


def test_a_session_without_a_chat_goes_on_with_plain_text(corpus, chatting):
    with loader(chatting, corpus) as made:
        first = made.converse("plain", "The bell of Ashcombe", tokens=4)
        second = made.converse("plain", " rang", tokens=4)
        with pytest.raises(ArgumentError, match="is empty"):
            made.converse("plain", "", tokens=4)
        with pytest.raises(ArgumentError, match="a text"):
            made.converse("plain", [5], chat=CHAT)
        with pytest.raises(ArgumentError, match="begin another session"):
            made.converse("plain", [5] * 4090)
    assert second.reused.loaded == first.reused.computed + 4


def test_what_begins_no_prompt_does_not_grow_as_a_session(small, chatting, ids):
    corpus = filled(small, chatting, coding=Coding(neutral_prefix=4))
    list(corpus.encode([Document("sessions/odd", ids)]))
    with loader(chatting, corpus) as made:
        answer = made.converse("odd", " And", tokens=2)
    assert (len(answer.tokens), answer.reused.saved) == (2, "")
    assert "was not computed as a prompt's beginning" in answer.misses[-1]


def test_callers_with_a_loop_of_their_own_ask_and_converse(corpus, chatting, ids, monkeypatch):
    list(corpus.encode([Document("text", ids)], index=("kvwire",)))
    with loader(chatting, corpus, quality_floor=4) as made:
        alone = made.ask_prompt([*ids, 7, 8, 9], tokens=2)
        reached, goes_on = threading.Event(), threading.Event()
        write = Saver.save

        def slow(self, *given):
            reached.set()
            goes_on.wait(30)
            return write(self, *given)

        async def beside_each_other():
            asked = made.ask_prompt_async([*ids, 7, 8, 9], tokens=2, reuse="exact")
            return await asyncio.gather(asked, made.converse_async("anna", "The bell", tokens=2))

        async def leaves():
            turn = asyncio.create_task(made.converse_async("anna", " and", tokens=2, deadline_s=30))
            await asyncio.to_thread(reached.wait, 30)
            turn.cancel()
            goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await turn
            return await made.converse_async("anna", " so", tokens=2)

        one, first = asyncio.run(beside_each_other())
        assert one.tokens == alone.tokens
        assert first.reused.saved == "sessions/anna"
        monkeypatch.setattr(Saver, "save", slow)
        later = asyncio.run(leaves())
    assert later.reused.document == "sessions/anna"
    assert later.reused.saved == "sessions/anna" or "not saved" in later.misses[-1]


def test_the_command_line_asks_prompts_and_sessions(run, small, demo_model, tmp_path):
    store, prompt = tmp_path / "store", tmp_path / "prompt.txt"
    store.mkdir()
    prompt.write_text(next(iter(small.texts.values()))[:600])
    where = ["--model", demo_model, "--store", store, "--tokens", 4, "--json"]
    code, out, err = run("ask", "--prompt", prompt, "--save", *where)
    assert code == 0, err
    assert json.loads(out)["reused"]["saved"].startswith("prompts/")
    code, out, err = run("ask", "--prompt", prompt, "--question", " And", *where)
    assert json.loads(out)["reused"]["document"].startswith("prompts/"), err  # computing it may be sooner
    for number in range(2):
        code, out, err = run("ask", "--session", "anna", "--question", "The bell rang, and", *where)
        assert (json.loads(out)["reused"]["document"] == "sessions/anna") == bool(number), err
    code, out, err = run("ask", "--session", "anna", "--question", "The bell rang, and", *where[:-1])
    assert "tokens of the prompt from sessions/anna" in out, err
    for words, why in (
        (["--question", "x"], "give one of them, got none"),
        (["--session", "a", "--prompt", prompt, "--question", "x"], "got --prompt and --session"),
        (["--session", "a"], "there is no question"),
        (["--docs", "a", "--question", "x", "--save"], "goes without --save"),
        (["--prompt", tmp_path / "none.txt"], "is not a file"),
    ):
        code, out, err = run("ask", *words, *where[:-1])
        assert (code != 0, why in err) == (True, True), err
    shutil.rmtree(store)
    store.mkdir()
    (store / "v1").touch()  # where blobs should go
    for words in (["--prompt", prompt, "--save"], ["--session", "anna", "--question", "The bell rang, and"]):
        code, out, err = run("ask", *words, *where)
        told = json.loads(out)
        assert (code, told["reused"]["saved"], told["error"]["kind"]) == (9, "", "PartialError"), err
        assert any("not saved: " in miss for miss in told["misses"])
        assert "was not saved, as told" in err
    shutil.rmtree(store)
