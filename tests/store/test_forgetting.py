"""Saved prompts that nobody used for long are forgotten: leaves first, named documents never, unless asked for."""

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.engines.vllm.saving import SAVED as FROM_VLLM
from kvwire.errors import ArgumentError, AuthError, CorruptError
from kvwire.runtime.prompt_request import SESSIONS
from kvwire.runtime.saving import PROMPTS
from kvwire.store import collect, forget
from kvwire.store.catalog.last_uses import LastUses
from kvwire.store.index_records import LastUse, is_saved
from kvwire.store.upkeep.forget import Stored, _windows, choose
from kvwire.types import digest_tokens

from ..store_wrappers import StoreWrapper
from .conftest import CONFIG, DAY

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(tuple)


def document(number, blobs, used, may_go):
    return Stored(f"doc {number}", blobs, float(used), may_go)


STORES = st.lists(st.tuples(NAMES, st.integers(0, 9), st.booleans()), max_size=12).map(
    lambda rows: [document(number, *row) for number, row in enumerate(rows)]
)
SIZES = {"a": 3, "b": 5, "c": 7}


def bytes_of(documents):
    return sum(SIZES[blob] for blob in {blob for each in documents for blob in each.blobs})


def stands_on(leaf, root):
    return len(leaf.blobs) > len(root.blobs) and leaf.blobs[: len(root.blobs)] == root.blobs


def used_with_all_behind(document, documents):
    return max(each.used for each in documents if each.blobs[: len(document.blobs)] == document.blobs)


@given(STORES, st.one_of(st.just(inf), st.integers(0, 30)), st.one_of(st.just(inf), st.integers(0, 9)))
def test_what_goes_is_what_the_rules_say(documents, keep, since):
    """A model in the plainest words: at every step the least recently used that may go, and nothing stands on."""
    left, gone = list(documents), []
    for document, freed in choose(documents, SIZES, keep, since):
        assert document.may_go
        assert used_with_all_behind(document, documents) <= since
        assert keep == inf or bytes_of(left) > keep or (gone and gone[-1].blobs == document.blobs)
        assert not any(stands_on(each, document) for each in left)
        free = [
            each for each in left
            if not any(stands_on(other, each) for other in left)
            and all(same.may_go for same in documents if same.blobs[: len(each.blobs)] == each.blobs)
        ]  # fmt: skip
        least = min(used_with_all_behind(each, documents) for each in free)
        assert used_with_all_behind(document, documents) == least
        before = bytes_of(left)
        left.remove(document)
        gone.append(document)
        assert freed == before - bytes_of(left)
    may_go = [
        each for each in left
        if all(same.may_go for same in documents if same.blobs[: len(each.blobs)] == each.blobs)
        and used_with_all_behind(each, documents) <= since
    ]  # fmt: skip
    assert not may_go or bytes_of(left) <= keep < inf


@given(STORES, st.integers(0, 30))
def test_windows_keep_the_order_and_never_hold_a_document_with_what_stands_on_it(documents, keep):
    doomed = list(choose(documents, SIZES, keep))
    windows = list(_windows(doomed))
    assert [pair for window in windows for pair in window] == doomed
    for window in windows:
        assert not any(stands_on(leaf, root) for leaf, _ in window for root, _ in window)


def put(catalog, name, size=100):
    ids = [ord(letter) for letter in name]
    return catalog.put_blob(
        CONFIG, name.encode().ljust(size, b"."), document_id=name, header_bytes=4, tokens=len(ids),
        token_digest=catalog.texts.put(CONFIG, ids),
    )  # fmt: skip


def names(catalog):
    return {entry.document_id for entry in catalog.documents(CONFIG)}


def test_a_use_in_time_keeps_a_prompt_and_a_name_keeps_a_document(store, catalog):
    entries = {name: put(catalog, name) for name in ("prompts/1", "prompts/2", "sessions/3", "book")}
    store.age(8 * DAY)
    assert LastUses(catalog, CONFIG).mark([entries["prompts/2"]]) == 1
    dry = forget(store, unused_s=7 * DAY, dry_run=True)
    assert names(catalog) == set(entries)
    done = forget(store, unused_s=7 * DAY)
    assert done == dry
    assert (done.documents, done.bytes, done.left) == (2, 200, 200)
    assert names(catalog) == {"prompts/2", "book"}
    collected = collect(store)
    assert (collected.blobs, collected.texts) == (2, 2)
    store.age(8 * DAY)
    assert forget(store, unused_s=7 * DAY, named=True).documents == 2
    assert names(catalog) == set()


def test_the_longest_unused_go_until_the_rest_fits(store, catalog):
    for name in ("prompts/1", "prompts/2", "prompts/3", "book"):
        put(catalog, name)
        store.age(2 * DAY)
    assert forget(store, keep_bytes=250, unused_s=30 * DAY).documents == 0
    done = forget(store, keep_bytes=250)
    assert (done.documents, done.left) == (2, 200)
    assert names(catalog) == {"prompts/3", "book"}
    assert forget(store, keep_bytes=0).left == 100  # the book stays


def test_nothing_young_goes_and_never_more_than_the_fraction(store, catalog):
    put(catalog, "prompts/1")
    assert forget(store, keep_bytes=0).documents == 0
    store.age(2 * DAY)
    with pytest.raises(ArgumentError, match="more than 50%"):
        forget(store, keep_bytes=0, max_fraction=0.5)
    assert names(catalog) == {"prompts/1"}


def test_what_is_used_while_it_is_forgotten_stays(store, catalog):
    entries = [put(catalog, f"prompts/{number}") for number in range(3)]
    store.age(2 * DAY)

    class Used(StoreWrapper):
        """A reader uses the third while the first is taken out."""

        def delete(self, key):
            LastUses(catalog, CONFIG).mark(entries[2:])
            super().delete(key)

    assert forget(Used(store), keep_bytes=0).documents == 2
    assert names(catalog) == {"prompts/2"}


def test_a_damaged_entry_is_told_and_stays(store, catalog):
    put(catalog, "prompts/1")
    put(catalog, "prompts/2")
    key = catalog.keys(CONFIG).document("prompts/1")
    store.put(key, b"{}")
    store.age(2 * DAY)
    done = forget(store, keep_bytes=0)
    assert done.documents == 1
    assert key in done.failures[0]
    assert store.get(key) == b"{}"


def test_marks_are_coarse_and_need_no_permission(store, catalog):
    entry = put(catalog, "prompts/1")
    uses = LastUses(catalog, CONFIG, every_s=60)
    assert [uses.mark([entry]), uses.mark([entry])] == [1, 0]
    assert LastUses(catalog, CONFIG, every_s=60).mark([entry]) == 0  # another process did
    store.age(120)
    assert LastUses(catalog, CONFIG, every_s=60).mark([entry]) == 1

    class ReadOnly(StoreWrapper):
        def put(self, *_):
            raise AuthError

    refused = LastUses(catalog.over(ReadOnly(store)), CONFIG, every_s=0)
    assert refused.mark([entry]) == 0
    assert refused.wanted([entry]) == []


def test_a_mark_goes_with_the_last_of_its_document(store, catalog):
    entry = put(catalog, "prompts/1")
    put(catalog, "book")
    LastUses(catalog, CONFIG).mark([entry])
    store.age(2 * DAY)
    forget(store, keep_bytes=100)
    collect(store)
    collect(store)
    assert not list(store.keys(catalog.keys(CONFIG).last_uses))


@pytest.mark.parametrize("wrong", [b"", b"[]", b'{"version":1}', b'{"version":1,"document_id":"a","token_digest":"x"}'])
def test_a_damaged_mark_is_refused(wrong):
    with pytest.raises(CorruptError):
        LastUse.from_json(wrong)


def test_the_mark_is_written_as_the_specification_shows_it():
    mark = LastUse("sessions/a", "d" * 64)
    shown = next(line for line in FORMAT.read_text().splitlines() if line.startswith('{"document_id":"sessions/a"'))
    assert mark.to_json().decode() == shown
    assert LastUse.from_json(mark.to_json()) == mark


def test_what_counts_as_saved_is_what_the_runtime_saves():
    digest = digest_tokens([1, 2, 3])[:32]
    for beginning in (PROMPTS, FROM_VLLM, SESSIONS, "head-"):
        assert is_saved(f"{beginning}{digest}")
    assert is_saved(f"{SESSIONS}anna\nand others")
    for name in (
        "head-of-state",
        f"head-{digest}0",
        f"head-{digest.upper()}",
        f"my/head-{digest}",
        f"x{PROMPTS}1",
        "saved",
    ):
        assert not is_saved(name)


def test_heads_of_prompts_are_forgotten_like_prompts(store, catalog):
    head = f"head-{'0' * 32}"
    for name in (head, "head-of-state"):
        put(catalog, name)
    store.age(8 * DAY)
    assert forget(store, unused_s=7 * DAY).documents == 1
    assert names(catalog) == {"head-of-state"}
