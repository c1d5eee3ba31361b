"""An S3 emulator, for as long as a block runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "kvwire"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
_START_S = 30.0


@dataclass(frozen=True)
class S3Server:
    """A running emulator."""

    endpoint: str

    def address(self, prefix: str) -> str:
        """The address of a store in its bucket."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}&region=us-east-1"


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def ministack() -> Iterator[S3Server]:
    """Start the emulator, and put its credentials where boto3 looks for them."""
    os.environ |= CREDENTIALS
    port = free_port()
    settings = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    command = [str(Path(sys.executable).with_name("ministack"))]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | settings,
    )
    try:
        _wait_for(port, process)
        server = S3Server(f"http://127.0.0.1:{port}")
        _make_bucket(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
        except OSError:
            assert process.poll() is None, "ministack ended; is it installed?"
            assert time.monotonic() < give_up_at, "ministack does not answer"
            time.sleep(0.05)
        else:
            return


def _make_bucket(server: S3Server) -> None:
    import boto3
    from botocore.config import Config

    config = Config(s3={"addressing_style": "path"})
    with closing(boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1", config=config)) as client:
        client.create_bucket(Bucket=BUCKET)
