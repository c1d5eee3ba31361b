"""Repairs kept, through both halves of the connector: linked documents with repaired rows laid over them, or time."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from kvwire import controller as ctl
from kvwire.errors import NotFoundError
from kvwire.reuse import LinkedPrompt, link
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.kept import RepairKeeper
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore
from kvwire.vllm import Choice, request_body, request_salt

from .halves import BLOCK, QUESTION, Halves, check

LEVEL = 1
COSTS = ctl.CostModel(ctl.PrefillCost(5.0, 0.01), ctl.DecodeCost(0.0005, 1e-5))
"""Text is slow, so that however busy the machine is, whatever has a blob is fetched."""


def repaired(told, names="abc", level=LEVEL):
    """Let a load compute rows, and keep them."""
    chosen = LoadSettings(repair=0.2, quality_floor=level, keep_repairs=True)
    with closing(FolderStore(told.root)) as store, Loader(
        told.engine, Corpus(told.engine, store), costs=COSTS, settings=chosen
    ) as loader:  # fmt: skip
        assert len(loader.ask(tuple(names), QUESTION).repair.rows)


def found(told, names="abc"):
    """What is kept, as the store gives it."""
    entries = [told.corpus.find(name) for name in names]
    return told.corpus.catalog.kept.find(told.corpus.meta.config_digest(), [each.token_digest for each in entries])


def expected(told, names="abc", level=LEVEL):
    """Linked documents with the rows over them."""
    caches = [told.corpus.decode(name, level, dtype=torch.float32) for name in names]
    entry = found(told, names)
    kept = RepairKeeper(told.corpus, told.corpus.catalog.store, 1 << 30).read(entry, [each.tokens for each in caches])
    linked = link(caches)
    kept.write(LinkedPrompt([each.tokens for each in caches], linked.meta, cache=linked))
    return linked, kept.rows


def body(told, names="abc", **more):
    return request_body(told.corpus, Choice(tuple(names), **{"level": LEVEL, "repair": "kept"} | more), QUESTION)


@pytest.fixture
def halves(told):
    made = Halves(told)
    yield made
    made.close()


def test_rows_that_were_kept_are_laid_over_linked_documents(told, halves):
    repaired(told)
    bad, blocks, answer, promised = halves.load(body(told))
    right, rows = expected(told)
    assert not bad
    assert "trouble" not in answer
    assert promised == right.tokens
    check(halves, blocks, right, 0, right.tokens)
    plain = link([told.corpus.decode(name, LEVEL, dtype=torch.float32) for name in "abc"])
    apart = (right.values[-1] - plain.values[-1]).abs().amax((0, 2))
    assert set(apart.nonzero()[:, 0].tolist()) == {int(row) for row in rows if row >= told.corpus.find("a").tokens}


def test_what_vllm_has_of_it_is_not_loaded_again(told, halves):
    repaired(told)
    had = 12 * BLOCK  # into the second document
    bad, blocks, _, promised = halves.load(body(told), computed=had)
    right, _ = expected(told)
    assert not bad
    assert promised == right.tokens - had
    check(halves, blocks, right, had, right.tokens)


def test_the_salt_names_the_rows(told):
    plain = request_salt(told.corpus, Choice(tuple("abc"), level=LEVEL))
    with pytest.raises(NotFoundError, match="no repair of these documents"):
        body(told)
    repaired(told)
    salt = body(told)["cache_salt"]
    assert salt != plain == request_salt(told.corpus, Choice(tuple("abc"), level=LEVEL))
    repaired(told, level=3)  # over finer documents, which give other rows
    assert body(told)["cache_salt"] not in {salt, plain}
    repaired(told, "bac")
    assert body(told, "bac")["cache_salt"] != body(told)["cache_salt"]


def test_a_salt_of_before_is_refused(told, halves):
    repaired(told)
    before = body(told)
    repaired(told, level=3)
    _, promised = halves.promise(before)
    assert promised == 0


@pytest.mark.parametrize("names", ["cab", "bc"])
def test_without_a_repair_that_fits_only_the_first_document_is_loaded(told, halves, names):
    """Another order's rows are not taken; what follows is vLLM's to compute, which sees all before it."""
    repaired(told)
    asked = body(told) | {"prompt": request_body(told.corpus, Choice(tuple(names), level=0), QUESTION)["prompt"]}
    asked["kv_transfer_params"] = {"kvwire": Choice(tuple(names), level=LEVEL, repair="kept").params()}
    name, promised = halves.promise(asked)  # nobody can know the salt but from the answer
    assert promised == 0
    asked["cache_salt"] = halves.scheduling.end(name)["kvwire"]["cache_salt"]
    bad, _, answer, promised = halves.load(asked)
    assert promised == told.corpus.find(names[0]).tokens
    assert not bad
    assert "no repair of these documents" in answer["trouble"]


def test_rows_over_coarser_documents_do_not_fit_a_finer_level(told):
    repaired(told, level=0)
    assert found(told).level == 0
    with pytest.raises(NotFoundError, match="that fits level 2"):
        body(told, level=2)


def test_a_repair_of_the_first_documents_serves_these(told, halves):
    repaired(told, "ab")
    bad, blocks, answer, promised = halves.load(body(told))
    right, _ = expected(told, "ab")
    assert promised == right.tokens
    assert not bad
    check(halves, blocks, right, 0, right.tokens)
    assert "kept of the first 2 documents alone" in answer["trouble"]


def test_damaged_rows_cost_time_alone(told, halves):
    """Everything behind the first document is computed: under this salt nothing unrepaired may lie."""
    repaired(told)
    asked, entry = body(told), found(told)
    part = next(each for each in entry.parts if each.count)
    path = next(each for each in told.root.rglob("*.kvr*") if part.sha256 in each.name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    bad, blocks, _, promised = halves.load(asked)
    first = told.corpus.find("a").tokens
    assert bad == set(blocks[first // BLOCK : -(-promised // BLOCK)])
    check(halves, blocks, told.corpus.decode("a", LEVEL, dtype=torch.float32), 0, first // BLOCK * BLOCK)


def test_a_missing_chunk_costs_what_follows_it(told, halves):
    repaired(told)
    asked = body(told)
    entry = told.corpus.find("c")
    next(told.root.rglob(entry.blob_key.rpartition("/")[2])).unlink()
    bad, blocks, _, promised = halves.load(asked)
    first = told.corpus.find("a").tokens
    assert bad == set(blocks[first // BLOCK : -(-promised // BLOCK)])
