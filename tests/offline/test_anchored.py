"""Documents with anchors, many at once: what their profile is fitted on, and what does not fit the window."""

from __future__ import annotations

import pytest
import torch

from kvwire.engines.transformers import open_engine
from kvwire.offline import RunOptions, encode_side_by_side, pipeline, prepare_profile
from kvwire.reuse import LinkLayout, SoftTokens, anchors, own_tokens, stored_tokens
from kvwire.runtime.calibrate import Calibration
from kvwire.runtime.coding import EXTENTS
from kvwire.runtime.corpus import Coding, Corpus
from kvwire.store import MemoryStore

LAYOUT = anchors(20, 4)


@pytest.fixture(scope="module")
def soft_engine(model):
    engine = open_engine(model, dtype=torch.float32)
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    engine.use_soft_tokens(SoftTokens(rows, LAYOUT.name, engine.meta.model_id, engine.meta.model_revision))
    return engine


@pytest.fixture
def corpus(soft_engine):
    return Corpus(soft_engine, MemoryStore(), coding=Coding(layout=LAYOUT))


@pytest.fixture
def computed(monkeypatch):
    """Token ids of every text that a profile is fitted on."""
    seen, compute = [], Calibration.compute

    def watched(self, ids, neutral=0):
        seen.append(tuple(ids))
        return compute(self, ids, neutral)

    monkeypatch.setattr(Calibration, "compute", watched)
    return seen


def test_a_sample_is_cut_between_tokens_of_documents_and_not_between_anchors(
    monkeypatch, corpus, soft_engine, folder, refs, computed
):
    """Of a large corpus beginnings are taken: each gets its anchors as if it were a whole document."""
    monkeypatch.setitem(EXTENTS, "full", 9 * 31)
    monkeypatch.setattr(pipeline, "SMALL", 0)
    monkeypatch.setattr(pipeline, "SHARE", 9)
    texts = [soft_engine.tokenize((folder / f"{ref.document_id}.txt").read_text()) for ref in refs]
    assert max(map(len, texts)) > 62
    assert prepare_profile(corpus, refs, RunOptions(refit=True)) is not None
    size = soft_engine.vocabulary_size
    beginnings = {tuple(ids[:62]) for ids in texts}
    assert computed
    for ids in computed:
        own = own_tokens(LAYOUT, ids, size)
        assert any(own == each[: len(own)] for each in beginnings)
        assert ids == stored_tokens(LAYOUT, own, size)


@pytest.mark.parametrize(
    "layout", [LAYOUT, LinkLayout("wrapped", tuple(range(5, 45)), (3, 4))], ids=lambda each: each.name
)
def test_a_document_that_fits_the_window_without_its_layout_alone_fails_alone(soft_engine, folder, refs, story, layout):
    """It enters no sample, and a run over the others goes on."""
    ids = soft_engine.tokenize(story)
    assert len(ids) >= 580
    (folder / f"{refs[0].document_id}.txt").write_text(soft_engine.detokenize(ids[:580]))
    corpus = Corpus(soft_engine, MemoryStore(), coding=Coding(layout=layout))
    profile = prepare_profile(corpus, refs)
    assert profile is not None
    failed, *others = [work.row for work in encode_side_by_side(corpus, refs, profile)]
    assert {row.status for row in others} == {"encoded"}
    assert failed.status == "failed"
    assert f"tokens that the layout {layout.name} puts into its cache" in failed.reason
    assert "do not fit the model's window of 600" in failed.reason
    assert failed.advice == "split the document"
