"""What requests say of documents, and the salt that keeps their caches apart."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from kvwire.engines.vllm.requests import entries_of, salt_of
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime.corpus import Corpus
from kvwire.store import FolderStore, open_store
from kvwire.transport.testing import serving
from kvwire.vllm import Choice, request_body, request_salt


@pytest.mark.parametrize(
    "choice",
    [
        Choice(("a",), level=0),
        Choice(("a", "b"), deadline_s=0.5),
        Choice(("b", "a"), deadline_s=2.0, objective="cheapest"),
        Choice(("a",), objective="earliest"),
        Choice(("a", "b"), level=1, repair="kept"),
        Choice(("a",), level=1, head=24),
        Choice(("a",), level=1, prefetch=("b", "c")),
        Choice(level=1, prefetch=("b",)),
    ],
)
def test_a_choice_is_read_as_it_was_written(choice):
    assert Choice.read(json.loads(json.dumps(choice.params()))) == choice
    goal = choice.goal(choice.deadline_s)
    assert (goal.floor, goal.ceiling) == (choice.level or 0, choice.level)


@pytest.mark.parametrize(
    ("params", "say"),
    [
        (None, "is an object"),
        (["a"], "is an object"),
        ({"documents": ["a"], "level": 1, "mend": 3}, "is an object"),
        ({"documents": ["a", "b"], "level": 1, "repair": 3}, 'repair is "kept"'),
        ({"documents": ["a", "b"], "level": 1, "repair": 0.15}, 'repair is "kept"'),
        ({"documents": ["a"], "level": 1, "repair": "kept"}, "of two documents at least"),
        ({"documents": ["a", "b"], "deadline_s": 1, "repair": "kept"}, "needs a level"),
        ({"prefix": True, "level": 1, "repair": "kept"}, "of two documents at least"),
        ({"level": 1}, "documents is a list"),
        ({"documents": [], "level": 1}, "documents is a list"),
        ({"documents": "a", "level": 1}, "documents is a list"),
        ({"documents": ["a", ""], "level": 1}, "documents is a list"),
        ({"documents": ["a", 3], "level": 1}, "documents is a list"),
        ({"soon": "a"}, "soon is a list"),
        ({"documents": ["a"], "level": True}, "level is a whole number"),
        ({"documents": ["a"], "level": -1}, "level is a whole number"),
        ({"documents": ["a"], "level": 1.0}, "level is a whole number"),
        ({"documents": ["a"], "deadline_s": 0}, "deadline_s is a number"),
        ({"documents": ["a"], "deadline_s": float("nan")}, "deadline_s is a number"),
        ({"documents": ["a"], "deadline_s": "1"}, "deadline_s is a number"),
        ({"documents": ["a"], "objective": "best"}, "objective is one of"),
        ({"documents": ["a"], "level": 1, "head": -1}, "head is how many tokens"),
        ({"documents": ["a"], "level": 1, "head": True}, "head is how many tokens"),
        ({"prefix": True, "level": 1, "head": 3}, "head is how many tokens"),
        ({"documents": ["a"]}, "say how good"),
        ({"documents": ["a"], "objective": "quality"}, "say how good"),
    ],
)
def test_what_is_no_choice_is_refused(params, say):
    with pytest.raises(ArgumentError, match=say):
        Choice.read(params)


def test_a_body_holds_all_that_vllm_needs(told):
    choice = Choice(("b", "a"), level=1)
    body = request_body(told.corpus, choice, [5, 6], model="m", max_tokens=3)
    assert body == {
        "model": "m",
        "max_tokens": 3,
        "prompt": [*told.tokens["b"], *told.tokens["a"], 5, 6],
        "cache_salt": request_salt(told.corpus, choice),
        "kv_transfer_params": {"kvwire": {"documents": ["b", "a"], "level": 1}},
    }
    assert json.loads(json.dumps(body)) == body
    longer = request_body(told.corpus, choice, [5, 6], computed=["c"])
    assert longer["prompt"] == [*told.tokens["b"], *told.tokens["a"], *told.tokens["c"], 5, 6]
    assert longer["cache_salt"] == body["cache_salt"]
    with pytest.raises(ArgumentError, match="at least one token"):
        request_body(told.corpus, choice, [])
    with pytest.raises(NotFoundError, match="'absent' is not in"):
        request_salt(told.corpus, replace(choice, documents=("absent",)))


def test_a_store_that_is_far_gives_the_same_entries(told):
    choice = Choice(("c", "absent", "a", "c", "b"), level=1)
    near = entries_of(told.corpus, choice.documents)
    assert [each and each.document_id for each in near] == ["c", None, "a", "c", "b"]
    with closing(FolderStore(told.root)) as store, serving(store) as url, closing(open_store(url)) as far:
        assert entries_of(Corpus.open(far), choice.documents) == near


def test_every_difference_gives_another_salt(told):
    choice, tenant, config = Choice(("a", "b"), level=1), "0" * 32, told.corpus.meta.config_digest()
    entries = entries_of(told.corpus, choice.documents)
    a, b = entries
    salts = {
        salt_of(choice, tenant, config, entries),
        salt_of(choice, "1" * 32, config, entries),
        salt_of(choice, tenant, "f" * 64, entries),
        salt_of(choice, tenant, config, [b, a]),
        salt_of(choice, tenant, config, [a, None]),
        salt_of(choice, tenant, config, [a, msgspec.structs.replace(b, profile_digest="c" * 64)]),
        salt_of(choice, tenant, config, [a, msgspec.structs.replace(b, token_digest="c" * 64)]),
        *(
            salt_of(each, tenant, config, entries)
            for each in (
                replace(choice, level=2),
                replace(choice, documents=("b", "a")),
                replace(choice, deadline_s=1.0),
                replace(choice, level=None, deadline_s=1.0),
                replace(choice, level=None, objective="earliest"),
            )
        ),
    }
    assert len(salts) == 12
    assert request_salt(told.corpus, choice) == salt_of(choice, told.corpus.catalog.tenant, config, entries)
    assert request_salt(told.corpus, choice).startswith(f"kvwire-documents-level-1-profile-{a.profile_digest[:12]}-")
