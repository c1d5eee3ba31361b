"""Emulators of S3, started once for each worker that needs them."""

import pytest

from ..s3_servers import ministack, moto


@pytest.fixture(scope="session")
def ministack_server(tmp_path_factory):
    with ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory):
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server
