from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwire.offline import DocumentRef
from kvwire.offline.pipeline import SHARE, SMALL, sample, stratified
from kvwire.runtime.calibrate import HELD_OUT
from kvwire.runtime.coding import CALIBRATION_TOKENS, Document


def ref(number, source="a", size=100):
    return DocumentRef(str(number), f"{source}/{number}.txt", "text", str(number), size=size)


def tokens_of(each):
    return Document(each.document_id, (1,) * max(1, each.size // 4))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1 << 16)), max_size=60))
def test_every_document_comes_once_and_every_stratum_first(given_refs):
    refs = [ref(number, source, size) for number, (source, size) in enumerate(given_refs)]
    found = stratified(refs)
    assert sorted(found, key=lambda each: int(each.document_id)) == refs
    strata = {(each.source.split("/")[0], each.size.bit_length()) for each in refs}
    assert {(each.source.split("/")[0], each.size.bit_length()) for each in found[: len(strata)]} == strata
    assert found == stratified(refs)


def test_a_small_corpus_is_taken_whole_and_in_its_order():
    refs = [ref(number, size=SMALL * CALIBRATION_TOKENS // 20) for number in range(20)]
    assert [each.document_id for each in sample(refs, tokens_of)] == [str(number) for number in range(20)]


def test_of_a_large_corpus_enough_is_taken_and_no_document_is_all_of_it():
    refs = [ref(0, "long", 1 << 22), *(ref(number, "short", 1000) for number in range(1, 1000))]
    found = sample(refs, tokens_of)
    assert max(len(each.token_ids) for each in found) == CALIBRATION_TOKENS // SHARE
    assert "0" in {each.document_id for each in found}
    tokens = [len(each.token_ids) for each in found]
    assert sum(tokens) >= 2 * CALIBRATION_TOKENS > sum(tokens[:-1])
    assert sum(tokens[:-HELD_OUT]) >= CALIBRATION_TOKENS


def test_a_quick_fit_takes_less_and_few_long_documents_give_more_of_each():
    refs = [ref(number, "short", 1000) for number in range(1000)]
    assert sum(len(each.token_ids) for each in sample(refs, tokens_of, 2048)) < 16 * 2048
    few = sample([ref(number, size=1 << 20) for number in range(3)], tokens_of, 2048)
    assert len(few) == 3
    assert 2 * 2048 <= sum(len(each.token_ids) for each in few) < 2 * 2048 + 3


def test_what_cannot_be_read_is_passed_over():
    refs = [
        ref(0, size=SMALL * CALIBRATION_TOKENS),
        DocumentRef("bad", "bad", "text", "bad", problem="gone"),
        ref(2, size=400),
    ]
    assert [each.document_id for each in sample(refs, lambda r: None if r.document_id == "0" else tokens_of(r))] == [
        "2"
    ]
