"""A vLLM beside a store of documents, and the engine that says what is right. Imports vLLM."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from kvwire.engines.vllm.requests import PARAMS
from kvwire.reuse import link
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.vllm import Choice, request_body

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvwire.store import Store

LENGTHS = {"a": 301, "b": 257, "c": 190, "d": 64}
CLOSE = 1e-4
QUESTION = (7, 8, 9, 10, 11)


@dataclass
class Place:
    """A store of documents, a vLLM beside it, and the engine that says what is right."""

    llm: LLM
    engine: object
    corpus: Corpus
    root: object
    block: int
    stop: ExitStack

    def ask(self, *bodies, tokens=4, **sampled):
        """Answers: log-probabilities of the first token, all tokens, what is told of documents, and tokens cached."""
        answers = []
        for out in self.outputs(*bodies, tokens=tokens, **sampled):
            first = {token: entry.logprob for token, entry in out.outputs[0].logprobs[0].items()}
            told = (out.kv_transfer_params or {}).get(PARAMS, {})
            answers.append((first, list(out.outputs[0].token_ids), told, out.num_cached_tokens))
        return answers

    def outputs(self, *bodies, tokens=4, **sampled):
        """What vLLM gives for requests."""
        prompts, params = [], []
        for body in bodies:
            prompts.append(TokensPrompt(prompt_token_ids=list(body["prompt"]), cache_salt=body.get("cache_salt")))
            given = body.get("kv_transfer_params")
            extra = {"kv_transfer_params": given} if given else None
            given = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 20} | sampled
            params.append(SamplingParams(extra_args=extra, **given))
        return self.llm.generate(prompts, params, use_tqdm=False)

    def expected(self, prompt, cached=None):
        """Log-probabilities behind a prompt whose beginning is this cache."""
        start = cached.tokens if cached is not None else 0
        past = None if cached is None else self.engine.past_key_values(cached)
        logits = self.engine.forward(past, list(prompt[start:]), start, logits=1)[-1].float()
        return torch.log_softmax(logits, -1)

    def linked(self, names, level):
        """Linked documents, each decoded where it stands, as loads do it.

        Turning keys a second time would change them by 1e-5, from which gpt-oss makes 1e-4 of what it says.
        """
        parts, at = [], 0
        for name in names:
            parts.append(self.corpus.decode(name, level, dtype=torch.float32, offset=at, begins=not at))
            at += parts[-1].tokens
        return link(parts)

    def body(self, names, level, question=QUESTION):
        return request_body(self.corpus, Choice(tuple(names), level=level), list(question))


def distance(first, expected):
    return max(abs(value - float(expected[token])) for token, value in first.items())


def save_model(folder: Path, seed: int = 3) -> Path:
    """A tiny model with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def encoded(engine, store: Store, lossless=False, **options) -> Corpus:
    """The documents in a store."""
    corpus = Corpus(engine, store, coding=Coding(chunk_tokens=64, lossless=lossless))
    draw = random.Random(5)
    documents = [Document(name, tuple(draw.choices(range(20, 500), k=n))) for name, n in LENGTHS.items()]
    list(corpus.encode(documents, **options))
    return corpus


@contextmanager
def serving_llm(
    model: Path, url: str, *, extra: dict | None = None, policy: str = "recompute", **options
) -> Iterator[LLM]:
    """A vLLM with the connector."""
    given = {
        "dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 2048,
        "skip_tokenizer_init": True, "max_num_batched_tokens": 512, "enable_chunked_prefill": True,
        "num_gpu_blocks_override": 256,
    } | options  # fmt: skip
    transfer = {
        "kv_connector": "KvwireConnector", "kv_connector_module_path": "kvwire.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": policy, "kv_connector_extra_config": {"store": url} | (extra or {}),
    }  # fmt: skip
    llm = LLM(model=str(model), kv_transfer_config=transfer, **given)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@dataclass
class ApiServer:
    """vLLM's server in a process of its own."""

    url: str
    process: subprocess.Popen
    log: object

    def words(self):
        """What it has said."""
        self.log.seek(0)
        return self.log.read()


@contextmanager
def api_server(model: Path, *options: str, **extra: object) -> Iterator[ApiServer]:
    """vLLM's server with the connector, once it answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        port = found.getsockname()[1]
    transfer = {
        "kv_connector": "KvwireConnector", "kv_connector_module_path": "kvwire.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32",
        "--enforce-eager", "--block-size", "32", "--port", str(port), "--served-model-name", "tiny",
        "--num-gpu-blocks-override", "128", "--kv-transfer-config", json.dumps(transfer), *options,
    ]  # fmt: skip
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        server = ApiServer(f"http://127.0.0.1:{port}", process, log)
        try:
            until = time.monotonic() + 300
            while True:
                assert time.monotonic() < until
                assert process.poll() is None, server.words()[-3000:]
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
