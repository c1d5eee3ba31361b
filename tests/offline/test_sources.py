from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.offline import DocumentRef, find_documents
from kvwire.offline.refs import TextReader

from ..s3_servers import moto


def read_all(refs):
    reader = TextReader()
    return {ref.document_id: reader.read(ref) for ref in refs if not ref.problem}


def test_a_folder_gives_its_text_files_by_their_paths(folder, texts):
    (folder / "notes.md").write_text("one\r\ntwo")
    (folder / "table.csv").write_text("a,b")
    assert read_all(find_documents([str(folder)])) == texts | {"notes": "one\ntwo"}


def test_a_glob_gives_what_it_matches_below_its_fixed_part(folder, texts):
    found = read_all(find_documents([f"{folder}/*/0[0-4].txt"]))
    assert found == {name: text for name, text in texts.items() if name.endswith(("00", "01", "02", "03", "04"))}
    with pytest.raises(NotFoundError, match="matches no file"):
        find_documents([f"{folder}/*.rst"])


def test_a_file_that_two_sources_name_is_one_document(folder):
    refs = find_documents([str(folder / "0"), str(folder / "0" / "00.txt")])
    assert [ref.document_id for ref in refs] == ["00", "03", "06"]
    assert not any(ref.problem for ref in refs)


def test_lines_of_json(tmp_path):
    lines = [
        b'{"id": "first", "text": "caf\xc3\xa9"}', b'{"text": "no id"}', b"", b"   ", b"{broken", b"[1]", b'{"id": 7}',
        b'{"id": "first", "text": "again"}', b'{"id": "gr\xc3\xbc\xc3\x9fe", "text": "last"}',
    ]  # fmt: skip
    path = tmp_path / "all.jsonl"
    path.write_bytes(b"\n".join(lines))
    refs = find_documents([str(path)])
    assert read_all(refs) == {"first": "café", "all/1": "no id", "grüße": "last"}
    problems = {ref.at: ref.problem for ref in refs if ref.problem}
    starts = [sum(len(line) + 1 for line in lines[:at]) for at in range(len(lines))]
    assert set(problems) == {starts[4], starts[5], starts[6], starts[7]}
    assert "no JSON" in problems[starts[4]]
    assert "no JSON object" in problems[starts[5]]
    assert "--text-column" in problems[starts[6]]
    assert "would both be document 'first'; rename one" in problems[starts[7]]


def test_lines_have_the_fields_that_are_named(tmp_path):
    path = tmp_path / "all.ndjson"
    path.write_text(json.dumps({"key": 3, "body": "text"}) + "\n")
    (ref,) = find_documents([str(path)], text_column="body", id_column="key")
    assert read_all([ref]) == {"3": "text"}


def test_problems_are_told_where_a_text_is_read(tmp_path, folder):
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "two\nlines.txt").write_text("x")
    refs = {ref.document_id: ref for ref in find_documents([str(folder)])}
    reader = TextReader()
    with pytest.raises(ArgumentError, match="UTF-8"):
        reader.read(refs["latin"])
    with pytest.raises(ArgumentError, match="U\\+000A, a control character; rename the file"):
        reader.read(refs["two\nlines"])
    gone = refs["0/00"]
    (folder / "0" / "00.txt").unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        reader.read(gone)


def test_references_survive_their_json(folder):
    (folder / "caf\udce9.txt").write_text("x")
    refs = find_documents([str(folder)])
    assert [DocumentRef.from_json(ref.to_json()) for ref in refs] == refs
    assert all(ref.to_json().isascii() for ref in refs)


@pytest.mark.parametrize("missing", ["nowhere", "nowhere.txt"])
def test_what_is_not_there_is_told(tmp_path, missing):
    with pytest.raises(NotFoundError, match="neither a file nor a folder"):
        find_documents([str(tmp_path / missing)])
    with pytest.raises(NotFoundError, match="no documents in"):
        find_documents([str(tmp_path)])


def test_objects_of_a_bucket(tmp_path, texts, monkeypatch):
    with moto(tmp_path) as server:
        server.set_environment(monkeypatch)
        client = server.client()
        for name, text in texts.items():
            client.put_object(Bucket="kvwire", Key=f"books/{name}.txt", Body=text.encode())
        lines = b'{"id": "a", "text": "one"}\n{"text": "two"}\n'
        client.put_object(Bucket="kvwire", Key="books/more.jsonl", Body=lines)
        client.put_object(Bucket="kvwire", Key="books/picture.png", Body=b"x")
        client.put_object(Bucket="kvwire", Key="books/empty.txt", Body=b"")
        client.put_object(Bucket="kvwire", Key="books/a name (1) é.txt", Body=b"three")
        refs = find_documents([server.address("books")])
        assert read_all(refs) == texts | {"a": "one", "more/1": "two", "a name (1) é": "three", "empty": ""}
        assert {ref.source for ref in refs} >= {"s3://kvwire/books/0/00.txt", "s3://kvwire/books/more.jsonl"}


def test_rows_of_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'kvwire[parquet]'")
    import pyarrow as pa

    path = tmp_path / "all.parquet"
    rows = {"id": ["a", None, "a"], "text": ["one", "two", None], "number": [1, 2, 3]}
    pq.write_table(pa.table(rows), path, row_group_size=2)
    refs = find_documents([str(path)])
    assert read_all(refs) == {"a": "one", "all/1": "two"}
    assert [ref.size for ref in refs] == [3, 3, 0]
    with pytest.raises(ArgumentError, match="no column 'body'"):
        find_documents([str(path)], text_column="body")
    with pytest.raises(ArgumentError, match="int64, no text"):
        find_documents([str(path)], text_column="number")
    (tmp_path / "broken.parquet").write_bytes(b"x" * 100)
    (ref,) = find_documents([str(tmp_path / "broken.parquet")])
    assert "cannot be read as Parquet" in ref.problem


def test_rows_of_a_dataset_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'kvwire[datasets]'")
    data = datasets.Dataset.from_dict({"text": ["one", "two"], "id": ["x", "y"]})
    data.save_to_disk(tmp_path / "plain")
    assert read_all(find_documents([str(tmp_path / "plain")])) == {"x": "one", "y": "two"}
    parts = datasets.DatasetDict({"train": data.remove_columns("id"), "test": data.select([1]).remove_columns("id")})
    parts.save_to_disk(tmp_path / "parts")
    found = read_all(find_documents([str(tmp_path / "parts")]))
    assert found == {"parts/test/0": "two", "parts/train/0": "one", "parts/train/1": "two"}


@pytest.mark.parametrize(("package", "extra"), [("pyarrow", "parquet"), ("datasets", "datasets")])
def test_without_an_extra_the_error_names_it(tmp_path, monkeypatch, package, extra):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    if package == "pyarrow":
        path = tmp_path / "all.parquet"
        path.write_bytes(b"PAR1")
    else:
        path = tmp_path / "data"
        path.mkdir()
        (path / "state.json").write_text("{}")
    with pytest.raises(ArgumentError, match=f"kvwire\\[{extra}\\]"):
        find_documents([str(path)])


@pytest.mark.parametrize("empty", ["", "  "])
def test_a_source_without_a_name_is_not_the_working_directory(tmp_path, monkeypatch, empty):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="a source has no name"):
        find_documents([empty])


def test_a_link_to_a_text_that_is_gone_is_told(folder, texts):
    (folder / "0" / "gone.txt").symlink_to("nowhere.txt")
    (folder / "0" / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.txt")
    for source in (str(folder), f"{folder}/*/*.txt"):
        (ref,) = (ref for ref in find_documents([source]) if ref.problem)
        assert (ref.document_id, "cannot be read (No such file or directory)" in ref.problem) == ("0/gone", True)


def test_a_folder_that_cannot_be_listed_is_told(folder, texts):
    """As another user than root, to whom every folder opens."""
    (folder / "0" / "closed").mkdir(mode=0)
    (folder / "0" / "names").mkdir()
    (folder / "0" / "names" / "only.txt").write_text("text")
    (folder / "0" / "linked.txt").symlink_to("closed/a.txt")
    (folder / "0" / "names").chmod(0o444)
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o055)
    code = f"""
import os
from kvwire.offline import find_documents
os.getuid() or os.setuid(65534)
for ref in find_documents([{str(folder)!r}]):
    print(ref.document_id, "-" if not ref.problem else ref.problem)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert "cannot be listed (Permission denied)" in told.pop("0/closed")
    for name in ("0/linked", "0/names/only"):
        assert "cannot be read (Permission denied)" in told.pop(name)
    assert told == dict.fromkeys(texts, "-")
