"""Names that uploads bring: none that would forge lines of lists and logs is taken, whoever uploads it."""

import hashlib
import json
import subprocess
import sys

import aiohttp
import pytest
import torch
from msgspec.structs import replace

from kvwire.codec import CacheMeta, KVCache, Ladder, encode, read_header
from kvwire.errors import ArgumentError
from kvwire.store import Catalog, FolderStore, MemoryStore
from kvwire.transport import serve
from kvwire.transport.server.uploads import check_names
from kvwire.transport.testing import serving
from kvwire.types import SEALED_MAGIC, LayerSpec, RopeRegime

DECEIVING = {
    "a\nb": "U+000A", "\x1b[2J": "U+001B", "\x9b": "U+009B", "a\u202eb": "U+202E", "\u2066": "U+2066",
    "\u200f": "U+200F", "a\u2028": "U+2028",
}  # fmt: skip
TAKEN = ("می\u200cروم", "שלום", "plain/name.v2", "👩\u200d🚀")


def blob_of(model="model", levels=("one", "two")):
    """A small blob of 8 tokens with these names in its header."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 8, 4), torch.randn(2, 1, 8, 4)
    layers = tuple(LayerSpec(1, 4, 4, rope=0) for _ in keys)
    meta = CacheMeta(model, "1" * 64, "", "float32", layers, (RopeRegime((1.0, 0.1)),))
    return encode(KVCache.from_tensors(list(keys), list(values), meta, range(8)), None, Ladder(3.6, levels))


def placed(blob, document_id, levels=("one",)):
    """Key and bytes of a blob, and of an entry for it, as they were written before names were looked at."""
    store = MemoryStore()
    catalog, info = Catalog(store), read_header(blob)
    space = catalog.keys(info.meta.config_digest())
    entry = catalog.put_blob(space, blob, document_id="d", header_bytes=info.header_bytes, tokens=8)
    entry = replace(entry, document_id=document_id, levels=tuple((name, 1) for name in levels))
    return {entry.blob_key: blob, space.document(document_id): entry.to_json()}


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "store")


@pytest.fixture
async def put(store):
    async with serve(store) as url, aiohttp.ClientSession() as client:

        async def call(key, data):
            async with client.put(f"{url}/{key}", data=data) as response:
                return response.status, await response.text()

        yield call


@pytest.mark.parametrize(("name", "character"), DECEIVING.items())
async def test_names_that_deceive_are_refused(put, store, name, character):
    good = blob_of()
    uploads = [placed(good, name).popitem(), placed(good, "d", levels=("one", name)).popitem()]
    uploads += [next(iter(placed(bad, "d").items())) for bad in (blob_of(model=name), blob_of(levels=(name, "two")))]
    for key, data in uploads:
        status, said = await put(key, data)
        assert status == 422
        assert json.loads(said)["error"].startswith(f"a name in it holds {character}, ")
        assert "encode it again" in said
    assert not list(store.keys(""))


async def test_half_of_a_surrogate_pair_is_refused(put, store):
    key, data = placed(blob_of(), "d").popitem()
    assert (await put(key, data.replace(b'"d"', b'"\\udc80"')))[0] == 422
    assert (await put(*placed(blob_of(), "d", levels=("\udc80",)).popitem()))[0] == 422
    assert (await put(*next(iter(placed(blob_of(model="\udc80"), "d").items()))))[0] == 422
    assert not list(store.keys(""))


@pytest.mark.parametrize("name", TAKEN)
async def test_names_of_any_script_are_taken(put, store, name):
    objects = placed(blob_of(model=name, levels=(name, "two")), name, levels=(name,))
    for key, data in objects.items():
        assert (await put(key, data))[0] == 201
    assert {key: store.get(key) for key in objects} == objects


async def test_what_is_no_blob_is_taken_as_before(put):
    """A blob's key says what its bytes are; readers refuse what is none."""
    good = blob_of()
    damaged = good[:70] + bytes(40) + good[110:]
    for data in (b"", b"any bytes", good[:8], good[:30], good[:100], damaged, SEALED_MAGIC + b"\n" * 100):
        assert (await put(f"v1/t/{hashlib.sha256(data).hexdigest()}.kvw", data))[0] == 201


async def test_what_lies_there_already_is_read_and_listed(store):
    objects = placed(blob_of(model="\x1b"), "a\nb")
    for key, data in objects.items():
        store.put(key, data)
    async with serve(store) as url, aiohttp.ClientSession() as client:
        for key, data in objects.items():
            async with client.get(f"{url}/{key}") as response:
                assert await response.read() == data


def test_a_client_is_told(store):
    from kvwire.transport import HttpStore

    with serving(store) as url:
        remote = HttpStore(url)
        with pytest.raises(ArgumentError, match=r"U\+000A, a control character"):
            remote.put(*placed(blob_of(), "a\nb").popitem())
        remote.close()


def test_looking_at_names_takes_no_torch(tmp_path):
    blob = tmp_path / "blob"
    blob.write_bytes(blob_of())
    code = f"""
import hashlib, sys
from pathlib import Path
from kvwire.transport.server.uploads import check_names
data = Path({str(blob)!r}).read_bytes()
check_names("v1/t/" + hashlib.sha256(data).hexdigest() + ".kvw", memoryview(data))
assert "zstandard" in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_any_other_object_has_no_names():
    for key in ("v1/t/x", f"v1/{'a' * 32}/{'b' * 16}/catalog/profile.json"):
        check_names(key, b'{"document_id": "a\\nb"}')
