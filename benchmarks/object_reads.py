"""Ranges of objects over loopback: kvwire's fetcher beside bare aiohttp and boto3, ``kvwire serve`` beside nginx.

Clients read the same ranges from the same nginx, in turns; each turn is a new event loop or client. What a client costs
is its processor time for each request, all of its threads included. Servers answer the same load generator, in turns:
wrk, where it is found, else aiohttp clients in processes of their own; what a server costs is its processes' time.

    python benchmarks/object_reads.py --nginx /usr/sbin/nginx --wrk /usr/bin/wrk
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from isal.isal_zlib import crc32
from measure import RESULTS, ratios, summary, table, write_json

from kvwire.store import FolderStore
from kvwire.transport import BlobFetcher, FetchSettings, HttpSource, open_session
from kvwire.types import SegmentInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OBJECT_BYTES = 64 << 20
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20}
BUCKET = "bucket"
_NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; keepalive_requests 1000000000;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


def main() -> None:
    """Run both comparisons, print them and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nginx", default=shutil.which("nginx") or "/usr/sbin/nginx")
    parser.add_argument("--wrk", default=shutil.which("wrk") or "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long one turn takes")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "object_reads.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = random.Random(options.seed).randbytes(OBJECT_BYTES)
        digest = hashlib.sha256(data).hexdigest()
        key = f"{digest}.kvw"
        FolderStore(Path(folder, BUCKET)).put(key, data)
        for path in (Path(folder), Path(folder, BUCKET)):
            path.chmod(0o755)  # nginx reads as another user where it starts as root
        nginx = stack.enter_context(running_nginx(options.nginx, Path(folder)))
        ours = stack.enter_context(running_kvwire(Path(folder, BUCKET)))
        results = {
            "clients": {name: clients(nginx, key, data, size, options) for name, size in SIZES.items()},
            "servers": {name: servers(nginx, ours, key, size, options) for name, size in SIZES.items()},
        }
    show(results)
    generator = "wrk" if options.wrk else "aiohttp clients in 2 processes"
    settings = {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "concurrency": options.concurrency,
        "seed": options.seed,
        "object_bytes": OBJECT_BYTES,
        "nginx": _said(options.nginx, "-v"),
        "load on servers": generator,
        "packages": {name: _version(name) for name in ("aiohttp", "boto3")},
    }
    write_json(options.out, "object_reads", settings, results)


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().splitlines()[0]


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


# Servers.


@contextmanager
def running_nginx(binary: str, folder: Path) -> Iterator[Server]:
    """One worker of nginx in front of a folder."""
    port, state = free_port(), folder / "nginx"
    state.mkdir()
    config = state / "nginx.conf"
    config.write_text(_NGINX.format(folder=state, port=port, root=folder), encoding="utf-8")
    command = [binary, "-p", str(state), "-c", str(config), "-e", str(state / "error.log")]
    with process(command, port) as server:
        yield Server(f"http://127.0.0.1:{port}/{BUCKET}", f"http://127.0.0.1:{port}", server)


@contextmanager
def running_kvwire(folder: Path) -> Iterator[Server]:
    """``kvwire serve`` over the folder, in one process, as it runs by default."""
    port = free_port()
    command = [sys.executable, "-m", "kvwire", "serve", "--store", folder.as_uri(), "--port", str(port)]
    with process([*command, "--log-level", "warning"], port) as server:
        yield Server(f"http://127.0.0.1:{port}", "", server)


class Server:
    """A running server: where objects are, where an S3 client would look, and its process."""

    def __init__(self, url: str, endpoint: str, process: subprocess.Popen[bytes]) -> None:
        """Keep the facts."""
        self.url, self.endpoint, self.process = url, endpoint, process

    def cpu_s(self) -> float:
        """Processor time of the process and its children so far."""
        return sum(_cpu_s(pid) for pid in [self.process.pid, *_children(self.process.pid)])


@contextmanager
def process(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that listens on a port; stopped at the end."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(port, server)
        yield server
    finally:
        server.terminate()
        server.wait(20)


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until the port answers."""
    for _ in range(400):
        if server.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"{server.args!r} does not answer")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


# Clients.


def clients(server: Server, key: str, data: bytes, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Requests a second and processor time of each client, in turns."""
    spans = [(start, start + size) for start in range(0, len(data), size)]
    segments = [SegmentInfo(n, 0, a, size, size, crc32(data[a:b]), 0, 0.0) for n, (a, b) in enumerate(spans)]
    url, concurrency = f"{server.url}/{key}", options.concurrency
    cases: dict[str, Callable[[int], None]] = {
        "aiohttp": lambda n: asyncio.run(bare(url, spans, n, concurrency)),
        "kvwire fetcher": lambda n: asyncio.run(fetched(url, segments, n, concurrency)),
        "boto3 threads": lambda n: boto3_threads(server.endpoint, key, spans, n, concurrency),
    }
    counts = {name: calibrated(case, options.seconds) for name, case in cases.items()}
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, case in cases.items():
            started, used = time.perf_counter(), time.process_time()
            case(counts[name])
            wall[name].append((time.perf_counter() - started) / counts[name])
            cpu[name].append((time.process_time() - used) / counts[name])
    return {
        "requests_s": {name: summary([1 / each for each in seconds]) for name, seconds in wall.items()},
        "client_cpu_us": {name: summary([1e6 * each for each in seconds]) for name, seconds in cpu.items()},
        "kvwire over aiohttp": summary(ratios(wall["aiohttp"], wall["kvwire fetcher"])),
        "kvwire over boto3": summary(ratios(wall["boto3 threads"], wall["kvwire fetcher"])),
    }


def calibrated(case: Callable[[int], None], seconds: float) -> int:
    """How many requests take about that long; warms up on the way."""
    case(64)
    started = time.perf_counter()
    case(256)
    return max(64, round(256 * seconds / (time.perf_counter() - started)))


async def bare(url: str, spans: list[tuple[int, int]], count: int, concurrency: int) -> None:
    """What a program does that uses aiohttp plainly: whole answers, nothing checked but their length."""
    numbers = iter(range(count))
    async with aiohttp.ClientSession() as session:

        async def work() -> None:
            for number in numbers:
                start, end = spans[number % len(spans)]
                async with session.get(url, headers={"Range": f"bytes={start}-{end - 1}"}) as response:
                    assert len(await response.read()) == end - start

        await asyncio.gather(*(work() for _ in range(concurrency)))


async def fetched(url: str, segments: list[SegmentInfo], count: int, concurrency: int) -> None:
    """The fetcher, each segment a request: checked against its CRC-32, retried, hedged and metered."""
    wanted = (segments * (count // len(segments) + 1))[:count]
    settings = FetchSettings(concurrency=concurrency, gap_bytes=0, max_bytes=segments[0].stored)
    async with open_session() as session, BlobFetcher(HttpSource(session, url), settings=settings) as fetcher:
        async for arrival in fetcher.fetch(wanted):
            assert len(getattr(arrival, "data", b"")) == segments[0].stored


def boto3_threads(endpoint: str, key: str, spans: list[tuple[int, int]], count: int, concurrency: int) -> None:
    """boto3's ``get_object`` in as many threads; the server answers as S3 does and checks no signature."""
    import boto3
    from botocore.config import Config

    config = Config(
        s3={"addressing_style": "path"}, max_pool_connections=concurrency, response_checksum_validation="when_required"
    )
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", config=config,
        aws_access_key_id="test", aws_secret_access_key="test",  # noqa: S106 - any will do
    )  # fmt: skip

    def get(number: int) -> None:
        start, end = spans[number % len(spans)]
        answer = client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={start}-{end - 1}")
        assert len(answer["Body"].read()) == end - start

    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(get, range(count)))


# Load on servers.


def servers(nginx: Server, ours: Server, key: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Requests a second and processor time of each server, in turns, under the same load."""
    load = partial(_wrk, options.wrk) if options.wrk else _processes
    rates: dict[str, list[float]] = {"nginx": [], "kvwire serve": []}
    cpu: dict[str, list[float]] = {"nginx": [], "kvwire serve": []}
    for turn in range(options.rounds + 1):
        for name, server in (("nginx", nginx), ("kvwire serve", ours)):
            used = server.cpu_s()
            count, seconds = load(f"{server.url}/{key}", size, options.concurrency, options.seconds)
            if turn:  # the first one warms up
                rates[name].append(count / seconds)
                cpu[name].append(1e6 * (server.cpu_s() - used) / count)
    return {
        "requests_s": {name: summary(each) for name, each in rates.items()},
        "server_cpu_us": {name: summary(each) for name, each in cpu.items()},
        "kvwire over nginx": summary([a / b for a, b in zip(rates["kvwire serve"], rates["nginx"], strict=True)]),
    }


def _wrk(binary: str, url: str, size: int, concurrency: int, seconds: float) -> tuple[int, float]:
    whole = max(1, round(seconds))
    header = f"Range: bytes={size}-{2 * size - 1}"
    command = [binary, "-t1", f"-c{concurrency}", f"-d{whole}s", "-H", header, url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"([0-9]+) requests in ([0-9.]+)s", text)
    if found is None or "Non-2xx" in text or "Socket errors" in text:
        raise SystemExit(f"wrk met errors:\n{text}")
    return int(found[1]), float(found[2])


def _processes(url: str, size: int, concurrency: int, seconds: float) -> tuple[int, float]:
    spans = [(start, start + size) for start in range(0, OBJECT_BYTES, size)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(_nothing, range(2))
        done = pool.starmap(_timed, [(url, spans, concurrency // 2, seconds)] * 2)
    return sum(count for count, _ in done), max(took for _, took in done)


def _nothing(_: int) -> None:
    """Start the process."""


def _timed(url: str, spans: list[tuple[int, int]], concurrency: int, seconds: float) -> tuple[int, float]:
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        asyncio.run(bare(url, spans, 128, concurrency))
        count += 128
    return count, time.perf_counter() - started


def show(results: dict[str, Any]) -> None:
    """Print medians."""
    for part, unit in (("clients", "client_cpu_us"), ("servers", "server_cpu_us")):
        rows = [
            [f"{size}, {name}", f"{found['requests_s'][name]['median']:.0f}", f"{found[unit][name]['median']:.0f}"]
            for size, found in results[part].items()
            for name in found["requests_s"]
        ]
        print(table([part, "requests/s", "CPU us/request"], rows))
        for size, found in results[part].items():
            for name, ratio in found.items():
                if " over " in name:
                    spread = f"{ratio['least']:.2f} to {ratio['greatest']:.2f}"
                    print(f"{size}: {name} {ratio['median']:.2f} ({spread})")


if __name__ == "__main__":
    main()
