"""A thousand mixed requests to one vLLM while its store dies, blobs are damaged and its cache's disk is full.

``python -c`` runs it on a small disk, see ``test_in_vllm_faults.py``.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvwire.engines.transformers import open_engine
from kvwire.engines.vllm.requests import PARAMS
from kvwire.runtime.corpus import Document
from kvwire.store import FolderStore
from kvwire.transport.testing import serving
from kvwire.vllm import Choice, request_body

from ..fault_proxy import FaultKind, FaultProxy, ProxyFault, at_random
from .inside import CLOSE, LENGTHS, Place, distance, encoded, serving_llm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK, TOKENS, ROUND = 32, 3, 100
KINDS = ("RESET", "TRUNCATE", "HANG_UP", "STATUS", "FLIP", "SHIFTED_RANGE")
FLAKY = at_random({ProxyFault(FaultKind[kind]): 0.05 for kind in KINDS}, 1)
PLANS = {
    "sound": None,
    "flaky": FLAKY,
    "dead": lambda _: ProxyFault(FaultKind.HANG_UP),
    "frozen": lambda _: ProxyFault(FaultKind.SILENT),
}
ROUNDS = ("sound", "flaky", "dead", "sound", "sound", "frozen", "flaky", "dead", "sound", "sound")
SETTLED = 4
"""Round after which nothing more may grow."""


def run(disk: str, fill: Callable[[], str], model: str, root: str, told_in: str) -> None:
    """Ask, compare each answer with its own reference, and look for leaks; figures go into a file."""
    with ExitStack() as stack:
        store = stack.enter_context(closing(FolderStore(root)))
        engine = open_engine(model, dtype=torch.float32)
        corpus = encoded(engine, store, index=("kvwire:32",))
        asked = Asked(corpus, damaged(corpus))
        link = stack.enter_context(FaultProxy(stack.enter_context(serving(store)), seed=1))
        extra = {
            "index": "kvwire:32", "save": "asked", "cache": disk, "cache_size": "40MB", "patience_s": 2, "load_s": 4,
            "pause_s": 0.5,
        }  # fmt: skip
        short = {"max_num_batched_tokens": 128, "max_num_seqs": 24, "num_gpu_blocks_override": 72}
        llm = stack.enter_context(serving_llm(Path(model), link.url, extra=extra, disable_log_stats=False, **short))
        place = Place(llm, engine, corpus, root, BLOCK, ExitStack())
        pids, states, told = processes(), [], []
        filler = fill()
        for turn, plan in enumerate(ROUNDS):
            link.plan = PLANS[plan]
            if plan == "sound":  # a store that was left alone is asked again by one request at a time, which may wait
                for _ in range(20):
                    time.sleep(2 * extra["pause_s"])
                    ((*_, last, _),) = place.ask(place.body("d", 1))
                    if last.get("loaded_tokens"):
                        break
            if turn == len(ROUNDS) - 1:
                Path(filler).unlink()
            began = time.monotonic()
            told.append(one_round(place, asked.bodies(turn)) | {"link": plan, "seconds": time.monotonic() - began})
            states.append([state_of(pid) for pid in pids])
        figures = {"rounds": told, "states": states, "faults": sum(link.faults.values())}
        for name in ("kvwire_lost_tokens", "kvwire_loaded_tokens", "kvwire_cache_write_errors", "num_preemptions"):
            figures[name] = counted(place, name)
        figures["blocks_held"] = counted(place, "kv_cache_usage_perc")
        prompt = random.Random(99).choices(range(20, 500), k=2040)  # takes 64 blocks of 71
        ((first, *_),) = place.ask({"prompt": prompt}, tokens=2)
        assert distance(first, place.expected(prompt)) <= 1e-5
        body = place.body("bcad", 2)
        ((first, _, last, _),) = place.ask(body)
        assert last["loaded_tokens"] == sum(LENGTHS.values()), last
        assert distance(first, place.expected(body["prompt"], place.linked("bcad", 2))) <= CLOSE
    Path(told_in).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def one_round(place: Place, bodies: Sequence[dict]) -> dict[str, float]:
    """Ask all at once; how far the worst answer is from its reference, and how many tokens were lost."""
    outs = place.outputs(*(body for body, _ in bodies), tokens=TOKENS)
    worst, lost, loaded = 0.0, 0, 0
    for (body, reference), out in zip(bodies, outs, strict=True):
        told = (out.kv_transfer_params or {}).get(PARAMS, {})
        answer = out.outputs[0]
        count = told.get("loaded_tokens", 0)
        lost, loaded = lost + told.get("lost_tokens", 0), loaded + count
        if told.get("lost_tokens"):
            count = count // BLOCK * BLOCK  # vLLM computes from the first block on that is not whole
        caches = [each.slice(0, count) for each in reference()] if count else [None]
        found = [apart_from(place, body["prompt"], cache, answer) for cache in caches]
        worst = max(worst, min(found))
        assert min(found) <= CLOSE, (found, told, len(body["prompt"]), body["kv_transfer_params"])
    return {"requests": len(outs), "worst": worst, "loaded_tokens": loaded, "lost_tokens": lost}


def apart_from(place: Place, prompt: list[int], cache: object, answer: object) -> float:
    """How far log-probabilities of every token are from those of transformers, whose greedy choice each token is."""
    start, past = (0, None) if cache is None else (cache.tokens, place.engine.past_key_values(cache))
    ids = list(answer.token_ids)
    logits = place.engine.forward(past, [*prompt[start:], *ids[:-1]], start, logits=len(ids)).float()
    right = torch.log_softmax(logits, -1)
    far = 0.0
    for step, (token, given) in enumerate(zip(ids, answer.logprobs, strict=True)):
        far = max(far, float(right[step].max() - right[step][token]))
        far = max(far, distance({key: each.logprob for key, each in given.items()}, right[step]))
    return far


class Asked:
    """Makes a round's requests, each with what it may be answered by."""

    def __init__(self, corpus: object, broken: dict[tuple[str, int], object]) -> None:
        """Decode nothing yet, but for what was decoded before it was damaged."""
        self._corpus, self._decoded = corpus, broken

    def bodies(self, turn: int) -> list[tuple[dict, Callable[[], list]]]:
        """Linked documents, prefixes and plain ones, a fifth of them with something wrong, each with a salt of its own.

        One salt for several would let what was computed while the store was away answer later requests.
        """
        made = []
        for number in range(ROUND // 10):
            seed, names = (turn + 1) * 1000 + number * 10, ("ad", "bd", "d", "c", "da")[number % 5]
            level, head = number % 3, names[0]
            torn = ("d", ("gone", "torn")[number % 2])
            text = self._corpus.text(self._corpus.find(head))
            wrong = self.linked(seed, names, level)
            wrong[0].update({"cache_salt": None} if number % 2 else {"kv_transfer_params": {PARAMS: {"level": 1}}})
            made += [
                self.linked(seed, names, level),
                self.linked(seed + 1, names[::-1], 2),
                self.linked(seed + 2, names, None),
                self.linked(seed + 3, torn, level),
                wrong,
                self.prefix(seed + 4, [*text[: 60 + number], *drawn(seed + 4, 20)], level, head),
                self.prefix(seed + 5, drawn(seed + 5, 90), 2, "", save=number < 2),
                self.prefix(seed + 6, [*text[:64], *drawn(seed + 6, 4)], 1, head),
                ({"prompt": drawn(seed + 7, 150), "kv_transfer_params": None}, list),
                ({"prompt": drawn(seed + 8, 40), "cache_salt": f"{number}", "kv_transfer_params": None}, list),
            ]
        return random.Random(turn).sample(made, len(made))

    def linked(self, seed: int, names: Sequence[str], level: int | None) -> tuple[dict, Callable[[], list]]:
        """Documents at a level, or in hardly any time."""
        choice = Choice(tuple(names), level=level) if level is not None else Choice(tuple(names), deadline_s=0.02)
        levels = range(5) if level is None else (level,)
        body = request_body(self._corpus, choice, drawn(seed, 5), cache_salt=f"own {seed}")
        return body, lambda: [self._joined(names, each) for each in levels]

    def prefix(
        self, seed: int, prompt: list[int], level: int, name: str, **more: object
    ) -> tuple[dict, Callable[[], list]]:
        """A prompt that begins as a document does, or as none."""
        choice = Choice(level=level, prefix=True, **more)
        body = request_body(self._corpus, choice, prompt, cache_salt=f"own {seed}")
        return body, lambda: [self._cache(name, level)]

    def _joined(self, names: Sequence[str], level: int) -> object:
        from kvwire.reuse import link

        return link([self._cache(name, level) for name in names])

    def _cache(self, name: str, level: int) -> object:
        if (name, level) not in self._decoded:
            self._decoded[name, level] = self._corpus.decode(name, level, dtype=torch.float32)
        return self._decoded[name, level]


def drawn(seed: int, count: int) -> list[int]:
    """Token ids."""
    return random.Random(seed).choices(range(20, 500), k=count)


def damaged(corpus: object) -> dict[tuple[str, int], object]:
    """Encode documents, and lose one's blob and flip a byte of the other's; gives what they were."""
    store, names = corpus.catalog.store, ("gone", "torn")
    list(corpus.encode([Document(name, tuple(drawn(500 + number, 120))) for number, name in enumerate(names)]))
    sound = {(name, level): corpus.decode(name, level, dtype=torch.float32) for name in names for level in range(5)}
    gone, torn = (corpus.find(name).blob_key for name in names)
    data = bytearray(store.get(torn))
    data[len(data) // 2] ^= 1
    store.delete(gone)
    store.put(torn, bytes(data))
    return sound


def counted(place: Place, name: str) -> float:
    """One of vLLM's metrics."""
    return sum(each.value for each in place.llm.get_metrics() if each.name == f"vllm:{name}")


def processes() -> list[int]:
    """Those below this one that schedule requests and run the model's steps."""
    below, found = [os.getpid()], []
    while below:
        children = Path(f"/proc/{below.pop()}/task").glob("*/children")
        pids = [int(pid) for each in children for pid in each.read_text(encoding="utf-8").split()]
        below += pids
        named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        found += [pid for pid, words in named.items() if b"VLLM::" in words or b"spawn_main" in words]
    return sorted(found)


def state_of(pid: int) -> tuple[float, int, int]:
    """Resident MiB, threads, and open files."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024, int(lines["Threads"]), len([*Path(f"/proc/{pid}/fd").iterdir()])
