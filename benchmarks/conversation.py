"""A conversation of many turns, kept turn by turn: time to first token, bytes, and what errors add up to.

    python benchmarks/conversation.py --turns 20 --link 50mbit

The user reads a novel to the model, the model answers greedily. Each turn is loaded over HTTP and an emulated link and
compared with a prefill of the whole conversation, in turns on the same machine. Every few turns the divergence from
that prefill, over the turn's question and answer, is compared with the level's own: that of rows that were computed
without loss and coded at the same level, in the same parts.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from measure import add_common_options, default_texts, one_thread, windows, write_json

import kvwire
from kvwire.codec import Profile
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore
from kvwire.transport import parse_link
from kvwire.transport.testing import serving

SYSTEM = "You listen to a novel and say in one sentence what may happen next."


def converse(
    engine: Any, profile: Profile, level: int, args: argparse.Namespace, *, with_text: bool  # noqa: ANN401 - any engine
) -> list[dict[str, Any]]:  # fmt: skip
    """Each turn of a conversation at one level."""
    (story,) = windows(engine, default_texts()[0], 1, args.turns * args.tokens, args.seed)
    store, chat, out = MemoryStore(), kvwire.Chat(system=SYSTEM), []
    settings = LoadSettings(quality_floor=level, quality_ceiling=level)
    exact = Corpus(engine, MemoryStore())
    exact.set_profile(profile)
    with serving(store) as url, closing(kvwire.open_store(url)) as far:
        corpus = Corpus(engine, far)
        corpus.set_profile(profile)
        with Loader(engine, corpus, link=parse_link(args.link), settings=settings) as loader:
            for turn in range(args.turns):
                said = engine.detokenize(story[turn * args.tokens : (turn + 1) * args.tokens])
                answer = loader.converse("novel", said, chat=chat, tokens=args.answer)
                row: dict[str, Any] = {
                    "turn": turn + 1, "loaded": answer.reused.loaded, "computed": answer.reused.computed,
                    "ttft_s": answer.timing.ttft_s, "bytes": answer.bytes, "expected_kl": answer.expected_kl,
                    "saved": bool(answer.reused.saved), "misses": len(answer.misses),
                }  # fmt: skip
                ids = corpus.text(corpus.find("sessions/novel"))
                stop = len(ids) - len(answer.tokens) + (answer.tokens[-1] in engine.end_tokens)
                if with_text and (turn + 1) % args.every == 0:
                    started = time.perf_counter()
                    engine.forward(None, ids[:stop], 0, logits=1)
                    row["text_s"] = time.perf_counter() - started
                if (turn + 1) % args.every == 0:
                    row |= _divergence(engine, exact, ids, answer.prompt.cache, level)
                out.append(row)
                print(level, row, flush=True)
    return out


def _divergence(engine: Any, exact: Corpus, ids: tuple[int, ...], loaded: Any, level: int) -> dict[str, float]:  # noqa: ANN401 - any engine
    """Of the turn's question and answer from a prefill of everything, and the level's own."""
    at = loaded.tokens
    full = engine.forward(None, ids, 0, logits=len(ids) - at)
    (rows,) = engine.prefill([ids[:at]])
    name = f"exact-{at}"
    exact.save(Document(name, ids[:at]), rows)
    own = exact.decode(name, level)

    def kl(cache: Any) -> float:  # noqa: ANN401 - a cache
        return mean_kl(full, engine.forward(engine.past_key_values(cache), ids[at:], at))

    return {"kl": kl(loaded), "own_kl": kl(own)}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "conversation")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=30, help="of the novel in each turn")
    parser.add_argument("--answer", type=int, default=24, help="tokens of each answer at most")
    parser.add_argument("--every", type=int, default=5, help="turns between measurements of the divergence")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--link", default="50mbit")
    parser.add_argument("--profile", type=Path, help="a fitted profile of the model; by default one is fitted")
    args = parser.parse_args()
    one_thread()
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    if args.profile:
        profile = Profile.from_bytes(args.profile.read_bytes())
    else:
        fitted = [Document(path.stem, tuple(windows(engine, path, 1, 1024, args.seed)[0])) for path in args.fit[:12]]
        profile = Corpus(engine, MemoryStore()).calibrate(fitted)
    results = {
        f"level {level}": converse(engine, profile, level, args, with_text=level == args.levels[0])
        for level in args.levels
    }
    settings = {
        "model": "SmolLM2-135M-Instruct" if args.model.name == "smol" else args.model.name, "turns": args.turns,
        "tokens": args.tokens, "answer": args.answer, "link": args.link,
    }  # fmt: skip
    write_json(args.out, "conversation", settings, results)


if __name__ == "__main__":
    main()
