"""Real servers, started by the scripts beside this file. What cannot be started fails the tests that need it."""

import random
import socket
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ..s3_servers import S3Server, with_bucket

HERE = Path(__file__).parent
START_S = 500  # the first start downloads the programs


def free_ports(count: int) -> int:
    """First of so many neighbouring ports, all free, below those that the system gives to clients."""
    for _ in range(100):
        first = random.randrange(10_000, 30_000)
        try:
            with ExitStack() as held:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    pytest.fail(f"found no {count} free ports in a row")


@contextmanager
def running(script: str, data: Path, ports: int):
    """The server of a script, on the port that this gives."""
    port = free_ports(ports)
    try:
        started = subprocess.run(
            [HERE / script, "start", data, str(port)], capture_output=True, text=True, timeout=START_S, check=False
        )
        if started.returncode:
            pytest.fail(f"{script} failed:\n{started.stdout[-2000:]}{started.stderr[-2000:]}")
        yield port
    finally:
        subprocess.run([HERE / script, "stop", data], check=True, timeout=60)


@pytest.fixture(scope="session")
def rgw_server(tmp_path_factory):
    with running("run_rgw.sh", tmp_path_factory.mktemp("rgw"), 20) as port:
        yield with_bucket(S3Server(f"http://127.0.0.1:{port}", "test", "testtest"))


@pytest.fixture(scope="session")
def swift_server(tmp_path_factory):
    with running("run_swift.sh", tmp_path_factory.mktemp("swift"), 4) as port:
        yield with_bucket(S3Server(f"http://127.0.0.1:{port}", "kv:test", "testtest"))


@pytest.fixture(scope="session")
def nginx(tmp_path_factory):
    data = tmp_path_factory.mktemp("nginx")
    with running("run_nginx.sh", data, 1) as port:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", folder=data / "www")
