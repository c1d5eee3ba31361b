"""A question is answered from a store on a file system that is read-only."""

from pathlib import Path

from ..small_disk import on_small_disk

ASK = """
from contextlib import closing
from kvwire import controller as ctl
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore
sys.path.insert(0, sys.argv[2])
from tiny_engine import TinyEngine

engine = TinyEngine()
costs = ctl.CostModel(ctl.PrefillCost(0.002, 0.0005), ctl.DecodeCost(0.0005, 1e-5))
texts = {"first": [n * 3 % 50 for n in range(150)], "second": [n * 7 % 50 for n in range(200)]}

def answer(store):
    settings = LoadSettings(max_kl=None, repair="none")
    with Loader(engine, Corpus(engine, store), costs=costs, settings=settings) as loader:
        return loader.ask(list(texts), [3, 1, 4], tokens=2)

with closing(FolderStore(disk)) as store:
    corpus = Corpus(engine, store, coding=Coding(chunk_tokens=128))
    for _ in corpus.encode([Document(name, tuple(ids)) for name, ids in texts.items()]):
        pass
remount("ro")
with closing(FolderStore(disk)) as store:
    told = answer(store)
    assert told.misses == ()
    assert {one.chunk.document for one in told.decisions} == {0, 1}
    print(len(told.tokens))
"""


def test_a_question_is_answered_from_a_read_only_store(tmp_path):
    assert on_small_disk(ASK, tmp_path, Path(__file__).parent) == "2\n"
