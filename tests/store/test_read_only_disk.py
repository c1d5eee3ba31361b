"""A folder store on a file system that is read-only: everything is read, every write says why it fails."""

from ..small_disk import on_small_disk


def test_everything_is_read_and_every_write_says_that_the_disk_is_read_only(tmp_path):
    told = on_small_disk(
        """
import io, json
from contextlib import closing, redirect_stderr, redirect_stdout
from kvwire.errors import KvwireError, NotFoundError, StorageError
from kvwire.store import Catalog, FolderStore

CONFIG = "c" * 64

def kvwire(*words):
    '''Exit code, and what is told.'''
    from kvwire.cli.app import main
    sys.argv = ["kvwire", "store", *words, "--store", disk]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue() + err.getvalue()

def told(action):
    try:
        action()
    except StorageError as error:
        return str(error)
    raise AssertionError("it was done")

with closing(FolderStore(disk)) as store:
    catalog = Catalog(store)
    for number in range(5):
        catalog.add_text(CONFIG, f"text {number}", [number, 2, 3])
    store.put("a/k", b"x")
    catalog.texts.put(CONFIG, [9, 9])  # garbage
    before = sorted(store.keys(""))
remount("ro")
with closing(FolderStore(disk)) as store:
    catalog = Catalog(store)
    assert sorted(store.keys("")) == before
    assert store.get("a/k") == b"x"
    assert {one.document_id for one in catalog.documents(CONFIG)} == {f"text {n}" for n in range(5)}
    for number in range(5):
        entry = catalog.by_document(CONFIG, f"text {number}")
        assert catalog.texts.get(CONFIG, entry.token_digest) == (number, 2, 3)
    assert catalog.by_document(CONFIG, "nobody's") is None
for words in (("ls",), ("ls", "--configs"), ("stat", "text 1"), ("verify",), ("gc", "--dry-run")):
    code, words = kvwire(*words)
    assert code == 0, words
with closing(FolderStore(disk)) as store:
    entry = next(key for key in before if "/catalog/doc/" in key)
    for action in (
        lambda: store.put("a/k", b"y"), lambda: store.put("b/c/k", b"y"), lambda: store.put(entry, b"{}"),
        lambda: store.delete("a/k"), lambda: store.delete(entry), lambda: store.put_many([(entry, b"{}")]),
        lambda: store.create("a/l", b"y"), lambda: Catalog(store).add_text(CONFIG, "new", [1]),
        lambda: FolderStore(os.path.join(disk, "new")).put("k", b"x"),
        lambda: FolderStore(os.path.join(disk, "new")).put(entry, b"x"),
    ):
        assert "is read-only" in told(action), told(action)
    store.delete("a/nothing")
    assert sorted(store.keys("")) == before
code, words = kvwire("rm", "text 1")
assert (code, "is read-only" in words) == (7, True), (code, words)
code, words = kvwire("gc", "--grace", "0s")
assert (code, "is read-only" in words) == (4, True), (code, words)
remount("rw")
with closing(FolderStore(disk)) as store:
    assert sorted(store.keys("")) == before
    store.put("a/k", b"y")
print("done")
""",
        tmp_path,
    )
    assert told == "done\n"
