"""Ray itself is not among the packages of the tests: what needs it is skipped where it is absent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from kvwire.engines.transformers import open_engine
from kvwire.errors import StorageError
from kvwire.offline import Row, encode_serially, find_documents, prepare_profile
from kvwire.offline.on_ray import Encoder, RaySettings, _most_actors, encode_on_ray
from kvwire.offline.steps import RunOptions
from kvwire.runtime.corpus import Corpus
from kvwire.store import FolderStore

from .test_pipeline import blobs, untimed

if TYPE_CHECKING:
    from pathlib import Path


def open_corpus(model: Path, store: Path) -> Corpus:
    return Corpus(open_engine(model, dtype=torch.float32), FolderStore(store))


@pytest.fixture
def opened(model, tmp_path):
    return partial(open_corpus, model, tmp_path / "store")


def rows_of(answer):
    import json

    return [Row.from_dict(json.loads(row)) for row in answer["row"]]


@pytest.mark.parametrize(
    ("resources", "settings", "actors"),
    [
        ({"CPU": 8.0}, RaySettings(), 8),
        ({"CPU": 8.0, "GPU": 2.0}, RaySettings(gpus=1.0), 2),
        ({"CPU": 8.0, "GPU": 2.0}, RaySettings(gpus=0.25), 8),
        ({"CPU": 1.0}, RaySettings(cpus=4.0), 1),
        ({"CPU": 3.0}, RaySettings(cpus=2.0), 1),
    ],
)
def test_there_are_as_many_actors_as_there_is_room_for(resources, settings, actors):
    assert _most_actors(resources, settings) == actors


def test_an_actor_encodes_as_a_serial_run_does(opened, refs, corpus):
    made = opened()
    made.set_profile(corpus.profile())
    fitted = {"profile": corpus.profile().digest, "config": corpus.config}
    actor = Encoder(opened, fitted, RunOptions())
    rows = rows_of(actor({"ref": [ref.to_json() for ref in refs]}))
    assert [row.status for row in rows] == ["encoded"] * len(refs)
    assert [row.blob for row in rows] == [row.blob for row in untimed(encode_serially(corpus, refs, corpus.profile()))]
    assert [row.status for row in rows_of(actor({"ref": [refs[0].to_json()]}))] == ["there already"]


def test_another_model_on_an_actors_machine_is_a_row_each(opened, refs):
    actor = Encoder(opened, {"profile": "", "config": "0" * 64}, RunOptions())
    rows = rows_of(actor({"ref": [ref.to_json() for ref in refs]}))
    assert {row.status for row in rows} == {"failed"}
    assert {row.reason for row in rows} == {"the model on this machine is not that of the run"}
    assert {row.advice for row in rows} == {"put the same weights there, then run again"}


def broken():
    msg = "the disk is gone"
    raise StorageError(msg)


def test_an_actor_that_cannot_begin_says_so_of_each_document(refs):
    rows = rows_of(Encoder(broken, {"profile": "", "config": ""}, RunOptions())({"ref": [refs[0].to_json()]}))
    assert [(row.status, row.reason) for row in rows] == [("failed", "the disk is gone")]


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvwire[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def test_many_processes_write_what_one_does(cluster, opened, folder, corpus):
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    refs = find_documents([str(folder)])
    rows = list(encode_on_ray(opened, refs, settings=RaySettings(actors=2, batch=2)))
    assert [row.id for row in rows] == [ref.document_id for ref in refs]
    assert [row.status for row in rows] == ["encoded"] * 9 + ["failed"]
    engine = opened().encoder().engine
    serial = Corpus(engine, FolderStore(folder.parent / "serial"))
    expected = untimed(encode_serially(serial, refs, prepare_profile(serial, refs)))
    times = {name: 0.0 for name in vars(rows[0]) if name.endswith("_s")}
    assert [replace(row, **times) for row in rows] == expected
    assert blobs(opened()) == blobs(serial)
    again = list(encode_on_ray(opened, refs[:3], settings=RaySettings(actors=1)))
    assert [row.status for row in again] == ["there already"] * 3


def test_what_fails_before_any_document_is_raised(cluster, refs):
    with pytest.raises(StorageError, match="the disk is gone"):
        list(encode_on_ray(broken, refs))
