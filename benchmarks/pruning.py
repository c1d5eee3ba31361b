"""Pruned caches against whole ones at coarser levels: bytes a token, and KL divergence from the exact whole cache.

    python benchmarks/pruning.py --model SmolLM2-135M-Instruct --profile smol.kvp

Windows of held-out books; half of the entries stay, chosen by the attention of the last 32 tokens (SnapKV): the same
tokens for all heads, or others for each layer and head.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from measure import SHARED, add_common_options, one_thread, write_json
from tqdm import tqdm

import kvwire
from kvwire.codec import Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.types import KVCache

TOKENS, CHUNK, LOOKING, SHARE = 512, 64, 32, 0.5


def attention(engine: Any, ids: Sequence[int], cache: KVCache) -> list[Tensor]:  # noqa: ANN401 - any engine
    """What the last tokens attend to, ``[kv_heads, tokens]`` for each layer, pooled over neighbours."""
    before = engine.model.config._attn_implementation  # noqa: SLF001 - no other way to read it
    engine.model.set_attn_implementation("eager")
    with torch.no_grad():
        found = engine.model(torch.tensor([ids]), output_attentions=True).attentions
    engine.model.set_attn_implementation(before)
    out = []
    for spec, weights in zip(cache.meta.layers, found, strict=True):
        by_head = weights[0, :, -LOOKING:].mean(1).view(spec.kv_heads, -1, len(ids)).mean(1)
        out.append(torch.nn.functional.max_pool1d(by_head[None], 7, 1, 3)[0])
    return out


def pruned(cache: KVCache, weights: Sequence[Tensor]) -> KVCache:
    """Half of each head's entries; the first token and those that looked always stay."""
    masks = []
    for each in weights:
        scores = each.clone()
        scores[:, [0, *range(cache.tokens - LOOKING, cache.tokens)]] = float("inf")
        best = scores.topk(int(SHARE * cache.tokens), 1).indices
        masks.append(torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, value=True))
    return replace(cache, kept=tuple(masks))


def measured(engine: Any, profile: Profile, text: str, generator: random.Random) -> dict[str, tuple[float, float]]:  # noqa: ANN401
    """Bytes a token and KL divergence by method and level."""
    at = generator.randrange(len(text) // 4, len(text) - 8 * TOKENS)
    words = list(engine.tokenize(text[at : at + 6 * TOKENS], place="first"))
    ids, behind = words[:TOKENS], words[TOKENS : TOKENS + 48]
    cache = engine.prefill([ids])[0]

    def logs(cache: KVCache) -> Tensor:
        logits = engine.forward(engine.own_past(cache), behind[:-1], cache.tokens, logits=16)
        return torch.log_softmax(logits.double(), -1)

    wanted, weights, out = logs(cache), attention(engine, ids, cache), dict[str, tuple[float, float]]()
    same = torch.stack([each.mean(0) for each in weights]).mean(0)
    ways = {
        "whole": cache,
        "half of the tokens": pruned(cache, [same.expand_as(each) for each in weights]),
        "half of each head": pruned(cache, weights),
    }
    for name, each in ways.items():
        blob = kvwire.encode(each, profile, chunk_tokens=CHUNK)
        info = kvwire.inspect(blob)
        for level in range(len(info.levels)):
            size = sum(info.chunk_bytes(chunk, level) for chunk in range(info.chunks)) / len(ids)
            got = logs(kvwire.decode(blob, level, profile, dtype=torch.float32))
            kl = max(0.0, float((wanted.exp() * (wanted - got)).sum(-1).mean()))
            out[f"{name}, level {level}"] = size, kl
    return out


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "pruning")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args()
    one_thread()
    engine, profile = kvwire.open_engine(str(args.model)), Profile.from_bytes(args.profile.read_bytes())
    texts = [path.read_text() for path in sorted((SHARED / "text" / "heldout").rglob("*.txt"))]
    rows: dict[str, list[tuple[float, float]]] = {}
    for number in tqdm(range(args.prompts), disable=None):
        generator = random.Random(f"{args.seed} {number}")
        for name, row in measured(engine, profile, generator.choice(texts), generator).items():
            rows.setdefault(name, []).append(row)
    results = {}
    for name, each in rows.items():
        size, kl = (fmean(values) for values in zip(*each, strict=True))
        results[name] = {"bytes_per_token": size, "kl": kl}
        print(f"{name:32}{size:8.0f} B  KL {kl:.5f}")
    settings = {"prompts": args.prompts, "tokens": TOKENS, "chunk": CHUNK, "model": args.model.name, "seed": args.seed}
    write_json(args.out, "pruning", settings, results)


if __name__ == "__main__":
    main()
