"""The store over HTTP, in front of the real server, does what every store of blobs and catalog entries does."""

from contextlib import closing

import pytest

from kvwire.store import FolderStore, MemoryStore
from kvwire.store.testing import BlobConformance
from kvwire.transport import HttpStore
from kvwire.transport.testing import serving


class TestHttpStore(BlobConformance):
    has_snapshots = False

    @pytest.fixture
    def behind(self, tmp_path):
        return FolderStore(tmp_path)

    @pytest.fixture
    def store(self, behind):
        with serving(behind) as url, closing(HttpStore(url)) as store:
            yield store


class TestHttpStoreBeforeMemoryWithAToken(TestHttpStore):
    @pytest.fixture
    def behind(self):
        return MemoryStore()

    @pytest.fixture
    def store(self, behind):
        with serving(behind, token="t") as url, closing(HttpStore(url, token="t")) as store:  # noqa: S106
            yield store
