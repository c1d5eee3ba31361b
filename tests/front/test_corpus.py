from __future__ import annotations

from kvwire.codec import decode
from kvwire.corpus import Corpus, Document
from kvwire.store import MemoryStore


def test_documents_come_in_order_whatever_is_known(small):
    corpus = Corpus(small.engine, MemoryStore())
    corpus.set_profile(small.profile)
    ids = next(iter(small.tokens.values()))
    documents = [Document(str(size), tuple(ids[:size])) for size in (70, 30, 50, 20, 90)]
    list(corpus.encode([documents[2]]))
    done = list(corpus.encode(documents))
    assert [e.entry.document_id for e in done] == [d.document_id for d in documents]
    assert [e.skipped for e in done] == [False, False, True, False, False]
    for encoded, document in zip(done, documents, strict=True):
        blob = corpus.catalog.store.get(encoded.entry.blob_key)
        cache = decode(blob, profile=small.profile)
        (exact,) = small.engine.prefill([document.token_ids])
        assert cache.token_ids == document.token_ids
        error = float((cache.values[-1] - exact.values[-1]).norm() / exact.values[-1].norm())
        assert error < 0.2


def test_the_same_text_under_another_name_is_one_blob(small):
    corpus = small.corpus()
    name, ids = next(iter(small.tokens.items()))
    (encoded,) = corpus.encode([Document("another name", tuple(ids))])
    assert encoded.skipped
    assert corpus.find("another name").blob_key == corpus.find(name).blob_key
    (again,) = corpus.encode([Document(name, tuple(ids))], force=True)
    assert not again.skipped
    assert again.entry.sha256 == encoded.entry.sha256


def test_a_blob_does_not_depend_on_what_is_encoded_with_it(small):
    first, second = (Document(name, tuple(ids)) for name, ids in small.tokens.items())
    digests = []
    for together in ([first], [second, first]):
        corpus = Corpus(small.engine, MemoryStore())
        corpus.set_profile(small.profile)
        digests.append([e.entry.sha256 for e in corpus.encode(together)][-1])
    assert digests[0] == digests[1]
