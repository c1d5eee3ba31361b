"""S3 servers for tests: two emulators that start in a moment, and what every server has to pass."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

import kvwire.store.backends.s3.store
from kvwire.errors import KvwireError
from kvwire.store import S3Settings, S3Store
from kvwire.store.backends.s3.address import S3Address
from kvwire.store.backends.s3.client import S3Client
from kvwire.store.testing import StoreConformance

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 20
BUCKET = "kvwire"


@dataclass(frozen=True)
class S3Server:
    """A running server and the credentials that it takes."""

    endpoint: str
    access_key: str
    secret: str

    def address(self, prefix: str = "", bucket: str = BUCKET) -> str:
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def client(self):
        """A plain boto3 client, for looking behind the store."""
        config = Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"total_max_attempts": 1},
        )
        keys = {"aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret}
        return boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1", config=config, **keys)

    def set_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Credentials where boto3 looks for them, and nothing else of this machine's."""
        for name in [name for name in os.environ if _is_a_clients(name)]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", self.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", self.secret)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def _is_a_clients(name: str) -> bool:
    return name.startswith(("AWS_", "REQUESTS_CA", "SSL_CERT")) or name.lower().endswith("_proxy")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextmanager
def program(command: list[str], port: int, log: Path, **environment: str) -> Iterator[None]:
    """Run a server until its port answers, and to the end of the block; fail with its output where it does not."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | environment,
        )
    try:
        give_up_at = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > give_up_at:
                pytest.fail(f"{command[0]} did not come up:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.05)
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
    except OSError:
        return False
    return True


@contextmanager
def strict_moto(folder: Path) -> Iterator[S3Server]:
    """moto that checks signatures, which emulators usually do not; it knows none of presigned addresses."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    allowed_before = 4  # the requests below
    with program(command, port, folder / "moto.log", INITIAL_NO_AUTH_ACTION_COUNT=str(allowed_before)):
        endpoint = f"http://127.0.0.1:{port}"
        anyone = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        with closing(boto3.client("iam", endpoint_url=endpoint, **anyone)) as iam:
            iam.create_user(UserName="kv")
            key = iam.create_access_key(UserName="kv")["AccessKey"]
            policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
            iam.put_user_policy(UserName="kv", PolicyName="all", PolicyDocument=json.dumps(policy))
        yield with_bucket(S3Server(endpoint, key["AccessKeyId"], key["SecretAccessKey"]))


def with_bucket(server: S3Server) -> S3Server:
    with closing(server.client()) as client:
        client.create_bucket(Bucket=BUCKET)
    return server


@contextmanager
def ministack(folder: Path) -> Iterator[S3Server]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("ministack"))]
    settings = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    with program(command, port, folder / "ministack.log", **settings):
        yield with_bucket(S3Server(f"http://127.0.0.1:{port}", "test", "test"))


@contextmanager
def moto(folder: Path) -> Iterator[S3Server]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    with program(command, port, folder / "moto.log"):
        yield with_bucket(S3Server(f"http://127.0.0.1:{port}", "test", "test"))


def fails(call, *arguments):
    """The call's kvwire error."""
    with pytest.raises(KvwireError) as caught:
        call(*arguments)
    return caught.value


class S3Conformance(StoreConformance):
    """The suite, on a server that a subclass's fixture ``server`` gives. Each test has a prefix of its own."""

    has_snapshots = False
    clock_is_ours = False
    tag_is_the_digest = True
    many_keys = 1105
    large_bytes = 11 << 20
    rounds = 8
    settings = S3Settings(multipart_bytes=8 << 20, part_bytes=5 << 20)

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> S3Server:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def clients(cls, server):
        """A plain client, and the store's own: making one takes longer than most tests."""
        with pytest.MonkeyPatch.context() as patch, closing(server.client()) as raw:
            server.set_environment(patch)
            shared = S3Client(S3Address.parse(server.address()), cls.settings)
            patch.setattr(kvwire.store.backends.s3.store, "S3Client", lambda *_: shared)
            yield raw
            shared.close()

    @pytest.fixture
    def store(self, clients, server):
        self.raw = clients
        with closing(S3Store(server.address(f"t/{secrets.token_hex(8)}"), settings=self.settings)) as store:
            yield store

    def raw_get(self, store, key):
        try:
            return self.raw.get_object(**_place(store, key))["Body"].read()
        except ClientError:
            return None

    def raw_set(self, store, key, data):
        self.raw.put_object(**_place(store, key), Body=data)

    def raw_delete(self, store, key):
        self.raw.delete_object(**_place(store, key))


def _place(store, key):
    address = S3Address.parse(store.url)
    return {"Bucket": address.bucket, "Key": address.root + key}
