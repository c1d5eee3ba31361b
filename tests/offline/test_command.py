from __future__ import annotations

import json
import sys

from kvwire.offline import read_manifest


def test_a_manifest_tells_of_every_document(run, folder, model, tmp_path):
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    words = ["encode", folder, "--model", model, "--store", tmp_path / "store", "--manifest", tmp_path / "m.jsonl"]
    code, out, err = run(*words)
    assert code == 9
    assert err.splitlines()[-1] == "kvwire: 1 of 10 documents were left out"
    rows = read_manifest(str(tmp_path / "m.jsonl"))
    assert [row.status for row in rows] == ["encoded"] * 9 + ["failed"]
    assert "is not UTF-8 text" in rows[-1].reason
    assert rows[-1].advice == "convert it first"
    for row in rows[:-1]:
        assert f"{row.id}: {row.tokens} tokens  coarse" in out
        assert row.bytes >= row.levels[-1].bytes > row.levels[0].bytes
        assert len(row.blob) == len(row.profile) == 64
        assert row.levels[0].error > row.levels[-1].error > 0
        assert min(row.read_s, row.tokenize_s, row.prefill_s, row.encode_s, row.upload_s) > 0
    (folder / "latin.txt").unlink()
    assert run(*words)[0] == 0
    assert [row.status for row in read_manifest(str(tmp_path / "m.jsonl"))] == ["there already"] * 9


def test_duplicate_ids_and_broken_lines_are_rows(run, model, tmp_path, story):
    lines = [{"id": "a", "text": story[:400]}, {"id": "a", "text": story[400:800]}, {"id": "b", "text": 7}]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["encode", tmp_path / "*.jsonl", "--model", model, "--store", tmp_path / "store", "--json"]
    code, out, err = run(*words)
    report = json.loads(out)
    assert code == 9
    assert [row["id"] for row in report["documents"]] == ["a"]
    assert len(report["failures"]) == 2
    assert "rename one" in err


def test_where_nothing_can_be_encoded_every_document_says_why(run, folder, model, tmp_path):
    common = ["--model", model, "--store", tmp_path / "store", "--manifest", tmp_path / "m.jsonl"]
    assert run("encode", folder, *common)[0] == 0
    code, _, err = run("encode", folder, *common, "--method", "cachegen")
    assert code == 8
    rows = read_manifest(str(tmp_path / "m.jsonl"))
    assert len(rows) == 9
    assert {row.status for row in rows} == {"failed"}
    assert {row.problem for row in rows} <= {err.splitlines()[-1].removeprefix("kvwire: ")}


def test_a_bad_manifest_is_refused_before_anything_is_encoded(run, folder, model, tmp_path):
    code, _, err = run(
        "encode", folder, "--model", model, "--store", tmp_path / "store", "--manifest", tmp_path / "m.csv"
    )
    assert (code, "jsonl" in err) == (2, True)
    assert not (tmp_path / "store").exists()


def test_a_new_profile_is_fitted_where_it_is_asked_for(run, folder, model, tmp_path):
    words = ["--model", model, "--store", tmp_path / "store", "--manifest", tmp_path / "m.jsonl"]
    run("encode", folder / "0", *words)
    (first,) = {row.profile for row in read_manifest(str(tmp_path / "m.jsonl"))}
    assert run("encode", folder, *words, "--refit")[0] == 0
    (second,) = {row.profile for row in read_manifest(str(tmp_path / "m.jsonl"))}
    assert first != second
    code, out, _ = run("profile", "check", tmp_path / "m.jsonl")
    assert code == 0
    assert "of 9 documents" in out
    assert json.loads(run("profile", "check", tmp_path / "m.jsonl", "--json")[1])["documents"] == 9
    code, _, err = run("profile", "check", tmp_path / "m.jsonl", "--level", "best")
    assert (code, "the levels are" in err) == (2, True)


def test_without_ray_the_error_names_its_extra(run, folder, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run("encode", folder, "--model", model, "--store", tmp_path / "store", "--on", "ray")
    assert code == 2
    assert "kvwire[ray]" in err
    code, _, err = run("encode", folder, "--model", model, "--store", tmp_path / "s", "--on", "ray", "--deviation")
    assert (code, "without --on ray" in err) == (2, True)
