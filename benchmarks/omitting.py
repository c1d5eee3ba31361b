"""What the question need not see: chunks left out or at the coarsest level, against all at one level.

    python benchmarks/omitting.py --model SmolLM2-135M-Instruct --profile smol.kvp

Prompts are windows of held-out books (*prose*: the KL divergence of the words that follow), or have three codes in
them, one of which is asked for (*needle*: of the answer). The question looks at the coarsest level (*look*), or, as the
best that signatures of chunks could tell, at the exact cache (*oracle*). *Greedy* gives each chunk the level that
lowers the weighted error most for its bytes, within the bytes of all at one level.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from measure import SHARED, add_common_options, one_thread, write_json

import kvwire
from kvwire.codec import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.types import BlobInfo, KVCache

TOKENS, CHUNK, LEVELS = 1536, 64, 4
LOOKING = 32
THINGS = ["blue door", "red box", "green gate", "old safe", "small chest", "iron lock"]
Prompt = tuple[list[int], list[int], int, int]
"""Token ids; those behind them; how many of these look, and at how many of their last ones answers are compared."""


def prose(engine: Any, texts: Sequence[str], generator: random.Random) -> Prompt:  # noqa: ANN401 - any engine
    """A window of a book, and what follows it."""
    text = generator.choice(texts)
    at = generator.randrange(len(text) // 4, len(text) - 8 * TOKENS)
    ids = list(engine.tokenize(text[at : at + 6 * TOKENS], place="first"))
    return ids[:TOKENS], ids[TOKENS : TOKENS + LOOKING + 16], LOOKING, 16


def needle(engine: Any, texts: Sequence[str], generator: random.Random) -> Prompt:  # noqa: ANN401 - any engine
    """The same with three codes in it, and a question for one of them."""
    ids, *_ = prose(engine, texts, generator)
    names = generator.sample(THINGS, 3)
    codes = [str(generator.randrange(1000, 9999)) for _ in names]
    out, last = list[int](), 0
    for at, name, code in zip(sorted(generator.sample(range(100, TOKENS - 200), 3)), names, codes, strict=True):
        out += ids[last:at] + list(engine.tokenize(f"\n\nThe code of the {name} is {code}.\n\n", place="middle"))
        last = at
    asked = generator.randrange(3)
    words = f"\n\nQuestion: What is the code of the {names[asked]}?\nAnswer: The code of the {names[asked]} is"
    question = list(engine.tokenize(words, place="last"))
    answer = list(engine.tokenize(f" {codes[asked]}.", place="last"))
    return (out + ids[last:])[:TOKENS], question + answer, len(question), len(answer)


def mixed(caches: Sequence[KVCache], levels: Sequence[int | None]) -> KVCache:
    """Each chunk at its level; None: left out."""
    made = replace(
        caches[0], keys=[each.clone() for each in caches[0].keys], values=[each.clone() for each in caches[0].values]
    )
    kept = torch.ones(made.tokens, dtype=torch.bool)
    for chunk, level in enumerate(levels):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        kept[part] = level is not None
        fine = caches[level or 0]
        for target, source in zip((*made.keys, *made.values), (*fine.keys, *fine.values), strict=True):
            target[:, part] = source[:, part] if level is not None else 0
    if bool(kept.all()):
        return made
    return replace(made, kept=tuple(kept.expand(spec.kv_heads, -1).clone() for spec in made.meta.layers))


def greedy(info: BlobInfo, weights: Sequence[float], budget: int) -> list[int]:
    """Levels of chunks within some bytes, by what an error costs in each."""
    levels, left = [0] * info.chunks, budget - sum(info.chunk_bytes(chunk, 0) for chunk in range(info.chunks))
    error = [level.predicted_kl or 0.0 for level in info.levels]
    while True:
        steps = []
        for chunk, level in enumerate(levels):
            more = info.chunk_bytes(chunk, min(level + 1, LEVELS)) - info.chunk_bytes(chunk, level)
            if level < LEVELS and 0 < more <= left:
                steps.append((weights[chunk] * (error[level] - error[level + 1]) / more, chunk, more))
        if not steps:
            return levels
        _, chunk, more = max(steps)
        levels[chunk] += 1
        left -= more


def ways(
    info: BlobInfo, looked: dict[str, list[float]], oracle: dict[str, list[float]], generator: random.Random
) -> dict[str, list[int | None]]:
    """Levels of chunks by every method."""
    chunks = range(info.chunks)
    made: dict[str, list[int | None]] = {f"all at level {level}": [level] * info.chunks for level in range(LEVELS + 1)}

    def top(scores: Sequence[float], share: float) -> set[int]:
        ranked = sorted(chunks, key=lambda chunk: -scores[chunk])
        return {0, info.chunks - 1, *ranked[: max(1, round(share * info.chunks))]}  # the sink, and what is said last

    for score, share, level in product(looked, (0.1, 0.3, 0.5), (1, 2, 3)):
        seen, known = top(looked[score], share), top(oracle[score], share)
        made[f"look by {score}: {share:.0%} at level {level}, rest at 0"] = [level if c in seen else 0 for c in chunks]
        made[f"oracle by {score}: {share:.0%} at level {level}, rest left out"] = [
            level if c in known else None for c in chunks
        ]
    for share in (0.3, 0.5):
        some = top([generator.random() for _ in chunks], share)
        made[f"random: {share:.0%} at level 2, rest left out"] = [2 if c in some else None for c in chunks]
    for score, level in product(looked, (1, 2)):
        budget = sum(info.chunk_bytes(chunk, level) for chunk in chunks)
        made[f"look by {score}: greedy, bytes of level {level}"] = list(greedy(info, looked[score], budget))
    return made


def measured(
    engine: Any, profile: Profile, prompt: Prompt, generator: random.Random  # noqa: ANN401 - any engine
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Bytes a token, and KL divergence from the exact cache, by method."""
    ids, behind, looking, last = prompt
    exact = engine.prefill([ids])[0]
    blob = kvwire.encode(exact, profile, chunk_tokens=CHUNK)
    info = kvwire.inspect(blob)
    caches = [kvwire.decode(blob, level, profile, dtype=torch.float32) for level in range(LEVELS + 1)]

    def logs(cache: KVCache) -> torch.Tensor:
        logits = engine.forward(engine.past_key_values(cache), behind[:-1], cache.tokens, logits=last)
        return torch.log_softmax(logits.double(), -1)

    def scores(cache: KVCache) -> dict[str, list[float]]:
        seen = engine.look(cache, behind[:looking])
        by = {"attention": seen.attention, "influence": seen.influence}
        return {
            name: [float(each[chunk * CHUNK : (chunk + 1) * CHUNK].mean()) for chunk in range(info.chunks)]
            for name, each in by.items()
        }

    wanted, out = logs(exact), dict[str, tuple[float, float]]()
    for name, levels in ways(info, scores(caches[0]), scores(exact), generator).items():
        got = logs(mixed(caches, levels))
        kl = max(0.0, float((wanted.exp() * (wanted - got)).sum(-1).mean()))
        size = sum(info.chunk_bytes(chunk, level) for chunk, level in enumerate(levels) if level is not None)
        out[name] = size / len(ids), kl
    return out


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "omitting")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    args = parser.parse_args()
    one_thread()
    engine, profile = kvwire.open_engine(str(args.model)), Profile.from_bytes(args.profile.read_bytes())
    texts = [path.read_text() for path in sorted((SHARED / "text" / "heldout").rglob("*.txt"))]
    makers: dict[str, Callable[..., Prompt]] = {"needle": needle, "prose": prose}
    results: dict[str, Any] = {}
    for kind, make in makers.items():
        rows: dict[str, list[tuple[float, float]]] = {}
        for number in range(args.prompts):
            generator = random.Random(f"{args.seed} {kind} {number}")
            for name, row in measured(engine, profile, make(engine, texts, generator), generator).items():
                rows.setdefault(name, []).append(row)
            print(kind, number, flush=True)
        results[kind] = {
            name: {
                "bytes_per_token": fmean(size for size, _ in each),
                "kl": fmean(kl for _, kl in each),
                "kl_median": median(kl for _, kl in each),
            }
            for name, each in rows.items()
        }
        for name, each in results[kind].items():
            print(f"{kind:7}{name:56}{each['bytes_per_token']:7.0f} B  KL {each['kl']:.5f} ({each['kl_median']:.5f})")
    settings = {"prompts": args.prompts, "tokens": TOKENS, "chunk": CHUNK, "model": args.model.name, "seed": args.seed}
    write_json(args.out, "omitting", settings, results)


if __name__ == "__main__":
    main()
