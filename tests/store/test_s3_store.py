"""The S3 store on two emulators, which differ in much that S3 leaves open."""

from contextlib import closing

import pytest

from kvwire.errors import ArgumentError
from kvwire.store import S3Settings, S3Store

from ..s3_servers import S3Conformance


class TestMinistack(S3Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, ministack_server):
        return ministack_server


class TestMoto(S3Conformance):
    many_keys = 120
    settings = S3Settings(multipart_bytes=8 << 20, part_bytes=5 << 20, page_keys=25)
    rounds = 4

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, moto_server):
        return moto_server


def test_what_would_lie_where_nothing_leads_to_it_is_not_sent(ministack_server):
    key = f"v1/{'ab' * 16}/{'cd' * 8}/zz/{'0' * 64}.kvw"
    with closing(S3Store(ministack_server.address("misplaced"))) as store:
        for write in (store.put, store.create):
            with pytest.raises(ArgumentError, match="not where an object of its kind"):
                write(key, b"x")
