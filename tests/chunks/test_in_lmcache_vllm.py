"""vLLM beside LMCache's server with the adapter in it: documents that were encoded before come from kvwire's store."""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
pytest.importorskip("lmcache", reason="LMCache is not installed: make test-engines runs this in its environment")
pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines runs this in its environment")

from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from kvwire.engines.transformers import open_engine
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import FolderStore

pytestmark = pytest.mark.filterwarnings("default")
ROOT = Path(__file__).resolve().parents[2]
CHUNK, BLOCK, SALT, LEVEL = 128, 32, "coarse", 1
LENGTHS = {"a": 700, "b": 520}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model's folder, a store of its documents, an engine without loss, and the documents' corpus."""
    root = tmp_path_factory.mktemp("lmcache")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "model")
    engine, draw = open_engine(root / "model", dtype=torch.float32), random.Random(5)
    texts = {name: tuple(draw.choices(range(20, 500), k=count)) for name, count in LENGTHS.items()}
    with closing(FolderStore(root / "store")) as store:
        corpus = Corpus(engine, store, coding=Coding(chunk_tokens=64, lossless=True))
        list(corpus.encode([Document(*each) for each in texts.items()], index=(f"lmcache:{CHUNK}",)))
        yield root, engine, corpus, texts


def page(name):
    """A command of the page, in words."""
    text = (ROOT / "docs" / "how-to" / "serve-through-lmcache.md").read_text(encoding="utf-8")
    (line,) = [each for each in text.partition("```bash")[2].partition("```")[0].splitlines() if each.startswith(name)]
    return shlex.split(line)


@contextmanager
def served(root, log, *adapters):
    """LMCache's server with L2 adapters, started as the page says but for sizes and ports; two of its ports."""
    port, http = free_port(), free_port()
    words = page("lmcache server")[1:]
    own = {"--port": str(port), "--l1-size-gb": "1", "--chunk-size": str(CHUNK)}
    given = {name: own.pop(name, value) for name, value in zip(words[1::2], words[2::2], strict=True)}
    assert not own
    del given["--l2-adapter"]
    given |= {"--host": "127.0.0.1", "--http-host": "127.0.0.1", "--http-port": str(http), "--l1-init-size-gb": "1"}
    given["--supported-transfer-mode"] = "engine_driven"  # without a GPU
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", words[0]]
    command += [word for pair in given.items() for word in pair]
    for adapter in adapters:
        command += ["--l2-adapter", json.dumps(adapter)]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, cwd=root) as process:
        try:
            until = time.monotonic() + 120
            while True:
                is_starting = process.poll() is None and time.monotonic() < until
                assert is_starting, log.read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.3)
            yield port, http
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def serving(root, port):
    words = page("vllm serve")
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    transfer["kv_connector_extra_config"]["lmcache.mp.port"] = port
    llm = LLM(
        model=str(root / "model"), kv_transfer_config=transfer, dtype="float32", enforce_eager=True, block_size=BLOCK,
        max_model_len=2048, skip_tokenizer_init=True, num_gpu_blocks_override=128,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def asked(llm, prompt, salt=None):
    """Log-probabilities of the first token, and how many tokens came from a cache."""
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=20)
    tokens = TokensPrompt(prompt_token_ids=list(prompt), **({"cache_salt": salt} if salt else {}))
    (out,) = llm.generate([tokens], [sampling], use_tqdm=False)
    return {token: each.logprob for token, each in out.outputs[0].logprobs[0].items()}, out.num_cached_tokens


def distance(engine, first, prompt, cached=None):
    start = cached.tokens if cached is not None else 0
    past = None if cached is None else engine.past_key_values(cached)
    logits = engine.forward(past, list(prompt[start:]), start, logits=1)[-1].float()
    right = torch.log_softmax(logits, -1)
    return max(abs(value - float(right[token])) for token, value in first.items())


def adapter_of(root, **params):
    words = page("lmcache server")
    adapter = json.loads(words[words.index("--l2-adapter") + 1])
    own = {"store": f"file://{root}/store", "served_as": str(root / "model"), "chunk_tokens": CHUNK, "cpu_block": BLOCK}
    return adapter | {"adapter_params": adapter["adapter_params"] | own | params}


def test_documents_come_from_kvwires_store(place, tmp_path):
    """Exact ones for all requests, and coarse ones for those with the salt alone, from two adapters of one server."""
    root, engine, corpus, texts = place
    exact, coarse = adapter_of(root), adapter_of(root, cache_salt=SALT, level=LEVEL)
    question, fresh = (7, 8, 9, 10, 11), random.Random(9).choices(range(20, 500), k=300)
    with served(root, tmp_path / "server.log", exact, coarse) as (port, http), serving(root, port) as llm:
        for name, chunks in (("a", 5), ("b", 4)):
            prompt = (*texts[name], *question)
            first, cached = asked(llm, prompt)
            assert cached == chunks * CHUNK
            assert distance(engine, first, prompt) <= 1e-4
        first, cached = asked(llm, fresh)
        assert cached == 0
        assert distance(engine, first, fresh) <= 1e-4
        prompt = (*texts["a"], *question)
        first, cached = asked(llm, prompt, SALT)
        assert cached == 5 * CHUNK
        cache = corpus.decode("a", LEVEL, dtype=torch.float32).slice(0, 5 * CHUNK)
        assert distance(engine, first, prompt, cache) <= 1e-4
        assert distance(engine, first, prompt) > 1e-3
        first, _ = asked(llm, prompt)  # nothing of the coarse one is left for others
        assert distance(engine, first, prompt) <= 1e-4
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=5) as answer:
            told = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        assert float(told["kvwire_lmcache_loaded_chunks_total"]) >= 14
        assert float(told["kvwire_lmcache_fetched_bytes_total"]) > 1000
