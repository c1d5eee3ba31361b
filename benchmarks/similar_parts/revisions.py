"""Revisions of one text, asked in turn: what keeping those that were made of donors brings the next ones.

A sentence changes at a time. *Text*: all is computed. *First*: the first alone is kept. *All*: each is, computed whole
behind its answer. Every way has a store of its own behind HTTP and an emulated link.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import closing
from statistics import fmean
from typing import TYPE_CHECKING, Any

from measure import SHARED

import kvwire
from kvwire.errors import NotFoundError
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore
from kvwire.transport import parse_link
from kvwire.transport.testing import serving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from kvwire.codec import Profile

WAYS = ("text", "first", "all")
LINK = "500mbit"


def revisions(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """A text of 40 sentences, of which one changes at a time."""
    generator = random.Random("revisions")
    book = next(iter(sorted((SHARED / "text" / "heldout").glob("*.txt")))).read_text(encoding="utf-8")
    pool = [" ".join(each.split()) + "." for each in book.split(".") if 60 < len(each) < 200]
    text, out = generator.sample(pool, 40), []
    for _ in range(count):
        text[generator.randrange(len(text))] = generator.choice(pool)
        out.append(tokenizer.encode(" ".join(text)).ids)
    return out


def asked_in_turn(engine: Any, profile: Profile, texts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:  # noqa: ANN401
    """Seconds to the first token, seconds until it is kept, and KL divergence from a full prefill, of each and way."""
    rows: list[dict[str, Any]] = [{"tokens": len(ids)} for ids in texts]
    exact = [engine.forward(None, ids, 0, logits=1).float().cpu() for ids in map(opened(engine), texts)]
    for way in WAYS:
        with serving(MemoryStore()) as url, closing(kvwire.open_store(url)) as far:
            corpus = Corpus(engine, far)
            corpus.set_profile(profile)
            with Loader(engine, corpus, link=parse_link(LINK), settings=LoadSettings()) as loader:
                for reuse in ("none", "exact", "donors"):  # estimates settle
                    loader.ask_prompt(texts[-1][:400], reuse=reuse)
                for number, ids in enumerate(texts):
                    reuse, save = ("none", False) if way == "text" else ("auto", way == "all" or not number)
                    began = time.monotonic()
                    answer = loader.ask_prompt(ids, reuse=reuse, save=save)
                    answered, kept = time.monotonic(), answer.reused.saved
                    while kept and not is_there(corpus, kept):
                        time.sleep(0.02)
                    rows[number][way] = {
                        "ttft_s": answer.timing.ttft_s, "answer_s": answered - began,
                        "kept_s": time.monotonic() - answered, "donors": len(answer.reused.donors),
                        "holes": answer.reused.holes, "kl": mean_kl(exact[number], answer.logits[None]),
                    }  # fmt: skip
                    print(way, number, json.dumps(rows[number][way]), flush=True)
    return rows


def opened(engine: Any) -> Any:  # noqa: ANN401 - any engine; returns a function
    """Puts the opening tokens in front."""
    return lambda ids: (*engine.opening_tokens, *ids)


def is_there(corpus: Corpus, name: str) -> bool:
    """Whether a document can be found."""
    try:
        return bool(corpus.find(name))
    except NotFoundError:
        return False


def summed(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over all but the first, shares of the text's time."""
    later = rows[1:]
    text_s = fmean(row["text"]["ttft_s"] for row in later)
    out = {"text_s": text_s}
    for way in WAYS[1:]:
        out[f"{way}_share"] = fmean(row[way]["ttft_s"] for row in later) / text_s
        out[f"{way}_kl"] = fmean(row[way]["kl"] for row in later)
        out[f"{way}_holes"] = fmean(row[way]["holes"] for row in later)
    out["kept_share"] = fmean(row["all"]["kept_s"] for row in later) / text_s
    return out
