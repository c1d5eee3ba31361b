"""The S3 store on two emulators, which differ in much that S3 leaves open."""

import pytest

from kvwire.store import S3Settings

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
