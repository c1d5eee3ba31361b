"""What of a log of real prompts is found in earlier ones: by exact prefix, and with donors; recall of the sketch.

    python benchmarks/prompt_log.py --log ShareGPT_V3_unfiltered_cleaned_split.json

The log is ShareGPT's, a JSON list of conversations, or the beginning of one; none of its text is kept. ``turns``:
every turn of a conversation is a request with all that was said before, as chat servers get them. ``first turns``: one
request of each conversation, so that nothing is found but what others have said, too. Requests come in the log's order,
and each is kept, without its answer. The sketch finds donors as loads do (``DonorIndex.find``); for some requests all
earlier ones are compared, by the shingles that they share, and those with most of them token by token.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from measure import RESULTS, default_model, write_json
from similar import Kept
from tokenizers import Tokenizer

from kvwire.reuse import align
from kvwire.store import Catalog, DonorIndex
from kvwire.store.donors import SHINGLE
from kvwire.store.prefix.schemes import hash_scheme

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = "ab" * 32
LEAST, MOST = 32, 2048
"""Tokens of a request: shorter ones are phrases, longer ones are left out."""
DONORS, HALF = 4, 0.5


def conversations(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Roles and words of each; the end of a file that was cut off is left out."""
    text, decoder = path.read_text(encoding="utf-8", errors="replace"), json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        at += len(text[at : at + 64]) - len(text[at : at + 64].lstrip(" \r\n\t,"))
        try:
            found, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        yield [(turn["from"], turn["value"]) for turn in found["conversations"]]


def requests(path: Path, tokenizer: Tokenizer, most: int, *, turns: bool) -> Iterator[list[int]]:
    """Token ids of each request, in the template of chats, without a system text."""
    count = 0
    for said in conversations(path):
        words = ""
        for role, value in said:
            is_user = role in {"human", "user"}
            words += f"<|im_start|>{'user' if is_user else 'assistant'}\n{value}<|im_end|>\n"
            if not is_user:
                continue
            ids = tokenizer.encode(words + "<|im_start|>assistant\n").ids
            if LEAST <= len(ids) <= MOST:
                yield ids
                count += 1
            if count == most:
                return
            if not turns or len(ids) > MOST:
                break


def shingles(ids: list[int]) -> set[int]:
    """Hashes of all runs of 8 tokens."""
    return {hash(tuple(ids[at : at + SHINGLE])) for at in range(len(ids) - SHINGLE + 1)}


def agreeing(one: list[int], other: list[int]) -> int:
    """First tokens that two have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))


def found_in(path: Path, tokenizer: Tokenizer, most: int, every: int, *, turns: bool) -> dict[str, Any]:
    """Shares of requests and of their tokens."""
    store, scheme, seen = Kept(), hash_scheme("kvwire", CONFIG), dict[bytes, int]()
    index, rows, compared = (
        DonorIndex(Catalog(store), CONFIG),
        list[tuple[int, int, int]](),
        list[tuple[float, float]](),
    )
    where: dict[int, list[int]] = {}
    asked: list[list[int]] = []
    for number, ids in enumerate(requests(path, tokenizer, most, turns=turns)):
        hashes = scheme.hashes(ids)
        shared = next((at for at in range(len(hashes), 0, -1) if hashes[at - 1] in seen), 0)
        prefix = agreeing(ids, asked[seen[hashes[shared - 1]]]) if shared else 0
        donors = [donor.token_ids for donor in index.find(ids)]
        donated = align(donors[:DONORS], ids).reused if donors else 0
        rows.append((len(ids), prefix, max(prefix, donated)))
        own = shingles(ids)
        if number % every == every - 1:
            counts = Counter(other for each in own for other in where.get(each, ()))
            best = max((align([asked[other]], ids).reused for other, _ in counts.most_common(5)), default=0)
            sketched = max((align([donor], ids).reused for donor in donors), default=0)
            compared.append((sketched / len(ids), best / len(ids)))
        for each in own:
            where.setdefault(each, []).append(number)
        for each in hashes:
            seen.setdefault(each, number)
        asked.append(ids)
        store.add(ids)
        if number % 200 == 199:
            print(number + 1, summed(rows, compared), flush=True)
    return summed(rows, compared)


def summed(rows: list[tuple[int, int, int]], compared: list[tuple[float, float]]) -> dict[str, Any]:
    """Of requests and tokens, what is found; of donors of half a request, how many the sketch finds."""
    total, half = sum(tokens for tokens, *_ in rows), [pair for pair in compared if pair[1] >= HALF]
    return {
        "requests": len(rows), "tokens": total,
        "requests_by_prefix": fmean(prefix >= HALF * tokens for tokens, prefix, _ in rows),
        "requests_by_donors": fmean(donated >= HALF * tokens for tokens, _, donated in rows),
        "tokens_by_prefix": sum(prefix for _, prefix, _ in rows) / total,
        "tokens_by_donors": sum(donated for *_, donated in rows) / total,
        "compared": len(compared), "with_half": len(half),
        "recall": fmean(sketched >= HALF for sketched, _ in half) if half else None,
    }  # fmt: skip


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=default_model(), help="whose tokenizer is used")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--every", type=int, default=5, help="of how many requests one is compared with all before it")
    parser.add_argument("--out", type=Path, default=RESULTS / "prompt_log.json")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    results = {
        name: found_in(args.log, tokenizer, args.requests, args.every, turns=name == "turns")
        for name in ("turns", "first turns")
    }
    write_json(args.out, "prompt_log", {"log": args.log.name, "requests": args.requests}, results)


if __name__ == "__main__":
    main()
