from __future__ import annotations

import pytest

from kvwire.errors import ArgumentError, CorruptError, NotFoundError, StorageError
from kvwire.offline import LevelRow, Row, check_profile, read_manifest, writing

LEVELS = (LevelRow("coarse", 10, 0.5, 0.25, 0.125), LevelRow("fine", 30, 1.5, 0.0625, None))
ROWS = [
    Row("a", "a.txt", "encoded", 12, 99, "f" * 64, "e" * 64, LEVELS, 0.5, 0.25, 0.125, 2.0, 1.0, 0.5),
    Row("grüße\n", "b.txt", reason="no UTF-8", advice="convert it"),
    Row("t", "c.jsonl", "kept as text", 7),
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_are_read_as_they_were_written(tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'kvwire[parquet]'")
    path = tmp_path / f"manifest.{ending}"
    with writing(str(path)) as writer:
        for row in ROWS:
            writer.add(row)
        assert not path.exists()  # half a manifest would look like a whole one
    assert read_manifest(str(path)) == ROWS
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_names_that_are_no_text_are_written_out(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'kvwire[parquet]'")
    with writing(str(tmp_path / "m.parquet")) as writer:
        writer.add(Row("caf\udce9", "caf\udce9.txt"))
    assert read_manifest(str(tmp_path / "m.parquet")) == [Row("caf\\udce9", "caf\\udce9.txt")]


def test_bad_manifests_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match=r"parquet or \.jsonl"), writing(str(tmp_path / "m.csv")):
        pass
    with pytest.raises(StorageError, match="cannot be written"), writing(str(tmp_path / "no" / "m.jsonl")):
        pass
    with pytest.raises(NotFoundError, match="--manifest"):
        read_manifest(str(tmp_path / "m.jsonl"))
    for data in ("{", '{"id": "a"}', "[1]", '{"id": "a", "source": "", "levels": [{"x": 1}]}'):
        (tmp_path / "m.jsonl").write_text(data)
        with pytest.raises(CorruptError, match="manifest"):
            read_manifest(str(tmp_path / "m.jsonl"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ArgumentError, match="kvwire\\[parquet\\]"), writing(str(tmp_path / "m.parquet")):
        pass


def coded(name, source, error, tokens=100, profile="p", status="encoded"):
    levels = (LevelRow("coarse", 10, 0.5, 2 * error), LevelRow("fine", 30, 1.5, error))
    return Row(name, source, status, tokens, 40, "b", profile, levels, prefill_s=0.5, encode_s=0.25, upload_s=0.25)


def test_a_corpus_of_one_kind_needs_no_new_profile():
    rows = [coded(str(n), "books/x.txt", 0.01 + n / 10_000) for n in range(20)] + [ROWS[1], ROWS[2]]
    found = check_profile(rows)
    assert (found.level, found.documents, found.tokens, found.pays, found.off_documents) == ("fine", 20, 2000, False, 0)
    assert found.usual_error == pytest.approx(0.0104)
    assert found.seconds == pytest.approx(20.0)
    assert found.bytes == 800
    (group,) = found.groups
    assert (group.source, group.documents, group.error) == ("books", 20, pytest.approx(0.01095))


def test_text_of_another_kind_makes_a_new_profile_pay():
    rows = [coded(str(n), "books/x.txt", 0.01) for n in range(80)]
    few = [coded(f"c{n}", "code.jsonl", 0.03, profile="q") for n in range(8)]
    many = [coded(f"c{n}", "code.jsonl", 0.03, status="there already") for n in range(20)]
    assert not check_profile(rows + few).pays
    assert check_profile(rows + few).older_documents == 8
    found = check_profile(rows + many, "coarse")
    assert (found.pays, found.off_documents, found.off_tokens) == (True, 20, 2000)
    assert [(group.source, group.is_off) for group in found.groups] == [("code.jsonl", True), ("books", False)]
    assert found.seconds == pytest.approx(100.0)  # as long for each token as those took that were encoded


def test_a_check_needs_documents_and_a_level():
    with pytest.raises(ArgumentError, match="no document with a blob"):
        check_profile([ROWS[1]])
    with pytest.raises(ArgumentError, match="the levels are coarse, fine"):
        check_profile(ROWS, "finest")


def test_a_run_that_ends_leaves_the_manifest_before_it(tmp_path):
    path = tmp_path / "m.jsonl"
    with writing(str(path)) as writer:
        writer.add(ROWS[0])

    def ended():
        with writing(str(path)) as writer:
            writer.add(ROWS[1])
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        ended()
    assert read_manifest(str(path)) == ROWS[:1]
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


def test_single_documents_apart_are_no_reason_for_a_new_profile():
    rows = [coded(str(n), "books/x.txt", 0.02 if n % 10 == 0 else 0.01) for n in range(100)]
    assert (check_profile(rows).off_documents, check_profile(rows).pays) == (10, False)
    scattered = [coded(str(n), "all.jsonl", 0.01 if n % 3 else 0.014) for n in range(90)]
    assert (check_profile(scattered).off_documents, check_profile(scattered).pays) == (30, True)
