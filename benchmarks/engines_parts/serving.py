"""The vLLMs that the benchmark asks, and what stands beside them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvwire.store import Store

BLOCK = 32
LMCACHE_CHUNK = 256
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "KVWIRE_ESTIMATES": "off",
    "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The first token. seconds: from asking to having it; cached: tokens that vLLM did not compute."""

    seconds: float
    cached: int
    logprobs: dict[int, float]
    told: Mapping[str, Any]


@dataclass(frozen=True)
class Serving:
    """A vLLM."""

    llm: Any

    def ask(self, body: Mapping[str, Any], *, all_tokens: bool = False) -> Answer:
        """Ask for one token.

        Args:
            body: ``prompt``, and perhaps ``cache_salt`` and ``kv_transfer_params``.
            all_tokens: Have the log-probabilities of all tokens, which takes time.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = body.get("kv_transfer_params")
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=-1 if all_tokens else None, extra_args=extra)
        prompt = TokensPrompt(prompt_token_ids=list(body["prompt"]), cache_salt=body.get("cache_salt"))
        started = time.perf_counter()
        (out,) = self.llm.generate([prompt], [sampling], use_tqdm=False)
        seconds = time.perf_counter() - started
        found = out.outputs[0].logprobs
        logprobs = {token: entry.logprob for token, entry in found[0].items()} if found else {}
        return Answer(seconds, out.num_cached_tokens, logprobs, (out.kv_transfer_params or {}).get("kvwire", {}))

    def tokens(self, body: Mapping[str, Any], count: int) -> list[int]:
        """Greedy tokens behind a prompt, as ``ask`` takes it."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = body.get("kv_transfer_params")
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=extra)
        prompt = TokensPrompt(prompt_token_ids=list(body["prompt"]), cache_salt=body.get("cache_salt"))
        (out,) = self.llm.generate([prompt], [sampling], use_tqdm=False)
        return list(out.outputs[0].token_ids)

    def forget(self) -> None:
        """Have vLLM drop what it has of prompts."""
        assert self.llm.reset_prefix_cache()


@contextmanager
def vllm(model: Path, window: int, connector: str = "", **transfer: Any) -> Iterator[Serving]:  # noqa: ANN401
    """A vLLM on one thread of the processor.

    Args:
        model: Folder.
        window: Most tokens of a prompt.
        connector: Name of a connector; empty: none.
        **transfer: Further fields of its configuration.

    Yields:
        It.
    """
    from vllm import LLM

    config = {"kv_connector": connector, "kv_role": "kv_both", **transfer} if connector else None
    llm = LLM(
        model=str(model), dtype="float32", enforce_eager=True, block_size=BLOCK, max_model_len=window, max_logprobs=-1,
        skip_tokenizer_init=True, num_gpu_blocks_override=4 * window // BLOCK, distributed_executor_backend="uni",
        kv_transfer_config=config,
    )  # fmt: skip
    try:
        yield Serving(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


@dataclass(frozen=True)
class LMCacheServer:
    """LMCache's server beside vLLM. port: for its connector; http: of its management."""

    port: int
    http: int

    def forget(self) -> None:
        """Have it drop what it holds in memory; what it stored elsewhere stays."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/cache/clear", json.dumps({}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            assert answer.status == 200


@contextmanager
def lmcache_server(folder: Path, redis_port: int) -> Iterator[LMCacheServer]:
    """LMCache's server, which keeps chunks in memory and behind a Redis port.

    Args:
        folder: For its log.
        redis_port: Where.

    Yields:
        It.
    """
    port, http, log = free_port(), free_port(), folder / "lmcache.log"
    command = [
        sys.executable, "-c", "from lmcache.cli.main import main; main()", "server", "--host", "127.0.0.1",
        "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http), "--chunk-size", str(LMCACHE_CHUNK),
        "--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU",
        "--supported-transfer-mode", "engine_driven",
        "--l2-adapter", json.dumps({"type": "resp", "host": "127.0.0.1", "port": redis_port, "num_workers": 4}),
    ]  # fmt: skip
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, cwd=folder) as process:
        try:
            _wait_for(f"http://127.0.0.1:{http}/healthcheck", process, log)
            yield LMCacheServer(port, http)
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < until, log.read_text()[-2000:]
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=1).close()  # noqa: S310 - as above
            return
        time.sleep(0.2)


@contextmanager
def store_server(store: Store) -> Iterator[int]:
    """Serve a store as ``kvwire serve`` does, in a thread.

    Args:
        store: Its.

    Yields:
        The port on the loopback.
    """
    from kvwire.transport import serve

    ready, loop, ends, ports = threading.Event(), asyncio.new_event_loop(), [], []

    async def run() -> None:
        async with serve(store) as url:
            ends.append(asyncio.Event())
            ports.append(int(url.rsplit(":", 1)[1]))
            ready.set()
            await ends[0].wait()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(10)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(ends[0].set)
        thread.join()


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of packages that are there."""
    from importlib import metadata

    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def use_environment() -> None:
    """Set what vLLM and LMCache read from the environment, before they are imported."""
    os.environ.update(ENVIRONMENT)
