"""What of a log of real prompts is found in earlier ones: by exact prefix, and with donors; recall of the sketch.

    python benchmarks/prompt_log.py --log ShareGPT_V3_unfiltered_cleaned_split.json

The log is ShareGPT's, a JSON list of conversations, or the beginning of one; none of its text is kept. ``turns``:
every turn of a conversation is a request with all that was said before, as chat servers get them. ``first turns``: one
request of each conversation, so that nothing is found but what others have said, too. Requests come in the log's order,
and each is kept, without its answer. The sketch finds donors as loads do (``DonorIndex.find``); for some requests all
earlier ones are compared, by the shingles that they share, and those with most of them token by token.

``donors``: what it is worth which requests are kept, by tokens alone: only those that were not made of donors
(*exact*), or all (*edited*), which takes a whole pass *behind* the answer; of either, those that the sketch finds, or
those with the fewest holes, by brute force (*best*). Seconds are planned, and donors taken as loads take them: for
SmolLM2 on two cores at 50 Mbit/s, and for an 8B model's shape on an H100 at 10 Gbit/s. *Similar*: requests that share
half of their tokens with an earlier one. *Forms* are made of one template; *revisions* of a text of which one sentence
changes at a time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from measure import RESULTS, default_model, write_json
from similar import TEMPLATE, Kept, values
from similar_parts.revisions import revisions
from tokenizers import Tokenizer

from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.controller.simulator import costs
from kvwire.controller.simulator.machines import H100
from kvwire.controller.simulator.models import LLAMA_3_1_8B
from kvwire.controller.simulator.sizes import BITS
from kvwire.reuse import EditScript, Span, align, combine_spans, common_spans
from kvwire.reuse.edits.script import LEAST_SPAN
from kvwire.runtime.prompt_request import LAST_TOKENS
from kvwire.runtime.similar import LEAST_GAIN, LEAST_REUSED, ReuseCosts, repaired_rows
from kvwire.store import Catalog, DonorIndex
from kvwire.store.donors import SHINGLE
from kvwire.store.prefix.schemes import hash_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

CONFIG = "ab" * 32
LEAST, MOST = 32, 2048
"""Tokens of a request: shorter ones are phrases, longer ones are left out."""
DONORS, HALF = 4, 0.5
LEVEL, SHARE = 1, 0.15
"""What donors' rows are fetched at, and the share of rows behind a hole that is computed anew."""
MOST_BRUTE = 200
"""Requests of a log whose donors are found by brute force, too: it takes the square of their number."""
ALIGNED = 40
"""Of those that may share most tokens, as many are compared with a request by brute force."""


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


class Everything:
    """All requests that were kept, by the runs of four tokens in them."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._where: dict[tuple[int, ...], list[int]] = {}

    def add(self, number: int, ids: list[int]) -> None:
        """Keep a request."""
        for run in {tuple(ids[at : at + LEAST_SPAN]) for at in range(len(ids) - LEAST_SPAN + 1)}:
            self._where.setdefault(run, []).append(number)

    def ranked(self, ids: list[int]) -> list[tuple[int, int]]:
        """The most tokens that spans could have of each kept request, and its number; the most first."""
        covered: dict[int, list[int]] = {}
        for at in range(len(ids) - LEAST_SPAN + 1):
            for number in self._where.get(tuple(ids[at : at + LEAST_SPAN]), ()):
                tokens_end = covered.setdefault(number, [0, 0])
                tokens_end[0] += at + LEAST_SPAN - max(at, tokens_end[1])
                tokens_end[1] = at + LEAST_SPAN
        return sorted(((tokens, number) for number, (tokens, _) in covered.items()), reverse=True)


class Taken(NamedTuple):
    """What a request was made of: tokens that were reused, seconds of it, of its text, and of a pass behind it."""

    tokens: int
    reused: int
    seconds: float
    text_s: float
    is_edited: bool
    behind_s: float = 0.0


class Place(NamedTuple):
    """What a request takes somewhere: by link and engine, and bytes of a token that is fetched."""

    costs: ReuseCosts
    token_bytes: float

    def begun_s(self, prefix: int, tokens: int) -> float:
        """Until the first token where a beginning is loaded."""
        return self.costs.load_s(int(prefix * self.token_bytes), prefix) + self.costs.text_s(tokens - prefix, prefix)

    def edited_s(self, script: EditScript, tokens: int) -> float:
        """Until the first token of a request that is made of donors."""
        known, last, repaired = self.costs, tokens - script.tokens, repaired_rows(script, SHARE)
        return (
            known.load_s(int(script.reused * self.token_bytes), script.reused)
            + known.closing_s(script.tokens)
            + known.rows_s(script.computed, tokens)
            + known.rows_s(repaired, tokens)
            + known.text_s(last, script.tokens) * (2 if repaired else 1)
        )


SMALL = CostModel(PrefillCost(0.03, 1.8e-3, 2.93e-7), DecodeCost(0.0, 2e-4))  # 1,070 tokens in 2.12 s, 3,637 in 8.5 s
LARGE = costs(LLAMA_3_1_8B, H100)
PLACES = {
    "two cores": Place(ReuseCosts(SMALL, 6.25e6, 0.005), 1050),
    "H100": Place(
        ReuseCosts(replace(LARGE, decode=LARGE.decode.shared(64, 1)), 1.25e9, 0.002),
        BITS["kvwire"][LEVEL] * LLAMA_3_1_8B.cache_elements / 8,
    ),
}


@dataclass
class Choosing:
    """Requests that are kept as one way has it, and what those behind them are made of.

    Attributes:
        place: What they take.
        keeps_edited: Requests that were made of donors are kept, too, computed whole behind their answers.
        is_best: Donors are those with the fewest holes, by brute force; else the sketch finds them.
    """

    place: Place
    keeps_edited: bool
    is_best: bool = False
    rows: list[Taken] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Keep nothing yet."""
        self._store, self._scheme, self._seen = Kept(), hash_scheme("kvwire", CONFIG), dict[bytes, int]()
        self._index, self._all = DonorIndex(Catalog(self._store), CONFIG), Everything()
        self._asked, self._number = list[list[int]](), dict[tuple[int, ...], int]()

    def ask(self, ids: list[int]) -> None:
        """Take what pays, and keep the request where it may be kept."""
        hashes = self._scheme.hashes(ids)
        shared = next((at for at in range(len(hashes), 0, -1) if hashes[at - 1] in self._seen), 0)
        first = self._seen[hashes[shared - 1]] if shared else 0
        prefix = min(agreeing(ids, self._asked[first]), len(ids) - 1) if shared else 0
        text_s, begun_s = self.place.costs.text_s(len(ids), 0), self.place.begun_s(prefix, len(ids))
        plain = (prefix, begun_s) if prefix and begun_s < text_s else (0, text_s)
        script = self._edited(ids, prefix)
        edited_s = self.place.edited_s(script, len(ids)) if script else text_s
        is_edited = script is not None and script.reused > prefix and edited_s <= (1 - LEAST_GAIN) * plain[1]
        if is_edited and script is not None:
            behind_s = text_s if self.keeps_edited else 0.0
            self.rows.append(Taken(len(ids), script.reused, edited_s, text_s, is_edited=True, behind_s=behind_s))
        else:
            self.rows.append(Taken(len(ids), plain[0], plain[1], text_s, is_edited=False))
        if is_edited and not self.keeps_edited:
            return
        number = len(self._asked)
        self._asked.append(ids)
        self._number.setdefault(tuple(ids), number)
        for each in hashes:
            self._seen.setdefault(each, number)
        if self.is_best:
            self._all.add(number, ids)
        else:
            self._store.add(ids)

    def _found(self, ids: list[int], text: list[int]) -> list[int]:
        if not self.is_best:
            return [self._number[donor.token_ids] for donor in self._index.find(ids)]
        known = [number for _, number in self._all.ranked(text)[:ALIGNED]]
        return sorted(known, key=lambda number: -align([self._asked[number]], text).reused)[:DONORS]

    def _edited(self, ids: list[int], prefix: int) -> EditScript | None:
        """The soonest script, donors taken in one by one."""
        text = ids[: len(ids) - LAST_TOKENS]
        if len(text) < LEAST_REUSED:
            return None
        begin = [Span(0, 0, min(prefix, len(text)), 0)] if prefix else []
        spans, best = [begin] if prefix else [], None
        by_donor = {number: common_spans(self._asked[number], text, 1) for number in self._found(ids, text)}
        for number in sorted(by_donor, key=lambda each: -sum(span.tokens for span in by_donor[each])):
            runs = [span._replace(donor=len(spans)) for span in by_donor[number]]
            if len(spans) >= DONORS or sum(span.tokens for span in runs) < LEAST_REUSED:
                continue
            script = combine_spans([*spans, runs], len(text))
            if best is None or self.place.edited_s(script, len(ids)) < self.place.edited_s(best, len(ids)):
                best, spans = script, [*spans, runs]
        return best

    def summed(self, which: Sequence[int] | None = None) -> dict[str, float]:
        """Shares of tokens that were reused, and of the text's seconds."""
        rows = [self.rows[number] for number in which] if which is not None else self.rows
        return {
            "requests": len(rows),
            "tokens": sum(row.reused for row in rows) / max(1, sum(row.tokens for row in rows)),
            "seconds": sum(row.seconds for row in rows) / max(1e-9, sum(row.text_s for row in rows)),
            "edited": sum(row.is_edited for row in rows) / max(1, len(rows)),
            "behind": sum(row.behind_s for row in rows) / max(1e-9, sum(row.text_s for row in rows)),
        }


WAYS = {"exact": (False, False), "edited": (True, False), "exact, best": (False, True), "edited, best": (True, True)}


def forms(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Reports of one template, with values of their own."""
    made = [values(random.Random(f"form {number}")) for number in range(count)]
    return [tokenizer.encode(TEMPLATE.format(**each)).ids for each in made]


def donors_of(asked: list[list[int]], every: int) -> dict[str, Any]:
    """What requests are made of in each way, and what no sketch would find."""
    ways = {
        f"{at}: {name}": Choosing(place, *way)
        for at, place in PLACES.items()
        for name, way in WAYS.items()
        if not way[1] or (at == "two cores" and len(asked) <= MOST_BRUTE)
    }
    everything, similar, pairs = Everything(), list[int](), list[tuple[int, int, int]]()
    store = Kept()
    index = DonorIndex(Catalog(store), CONFIG)
    for number, ids in enumerate(asked):
        for way in ways.values():
            way.ask(ids)
        best = 0
        for bound, other in everything.ranked(ids)[:ALIGNED]:
            if bound <= best:
                break
            best = max(best, align([asked[other]], ids).reused)
        if best >= HALF * len(ids):
            similar.append(number)
        if number % every == every - 1:
            sketched = max((align([donor.token_ids], ids).reused for donor in index.find(ids)), default=0)
            pairs.append((len(ids), sketched, max(best, sketched)))
        everything.add(number, ids)
        store.add(ids)
        if number % 100 == 99:
            print(number + 1, {name: way.summed() for name, way in ways.items()}, flush=True)
    half = [pair for pair in pairs if pair[2] >= HALF * pair[0]]
    total = sum(tokens for tokens, *_ in pairs)
    return {
        "all": {name: way.summed() for name, way in ways.items()},
        "similar": {name: way.summed(similar) for name, way in ways.items()},
        "one donor of all kept": {
            "compared": len(pairs), "with_half": len(half),
            "with_half_by_sketch": sum(sketched >= HALF * tokens for tokens, sketched, _ in half),
            "tokens_by_sketch": sum(sketched for _, sketched, _ in pairs) / total,
            "tokens_by_brute_force": sum(best for *_, best in pairs) / total,
            "tokens_of_half_by_sketch": sum(sketched for tokens, sketched, _ in pairs if sketched >= HALF * tokens)
            / total,
            "tokens_of_half_by_brute_force": sum(best for tokens, _, best in pairs if best >= HALF * tokens) / total,
        },
    }  # fmt: skip


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=default_model(), help="whose tokenizer is used")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--every", type=int, default=5, help="of how many requests one is compared with all before it")
    parser.add_argument("--made", type=int, default=200, help="forms and revisions")
    parser.add_argument("--logs", nargs="*", default=["forms", "revisions", "first turns", "turns"], help="of donors")
    parser.add_argument("--parts", nargs="*", default=["turns", "first turns", "donors"])
    parser.add_argument("--out", type=Path, default=RESULTS / "prompt_log.json")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    settings = {"log": args.log.name, "requests": args.requests, "made": args.made}
    results: dict[str, Any] = json.loads(args.out.read_text())["results"] if args.out.exists() else {}
    for name in ("turns", "first turns"):
        if name in args.parts:
            results[name] = found_in(args.log, tokenizer, args.requests, args.every, turns=name == "turns")
    if "donors" in args.parts:
        logs: dict[str, Callable[[], Iterable[list[int]]]] = {
            "forms": lambda: forms(tokenizer, args.made),
            "revisions": lambda: revisions(tokenizer, args.made),
            "first turns": lambda: requests(args.log, tokenizer, args.requests, turns=False),
            "turns": lambda: requests(args.log, tokenizer, args.requests, turns=True),
        }
        results.setdefault("donors", {})
        for name in args.logs:
            results["donors"][name] = donors_of(list(logs[name]()), args.every)
            print(name, json.dumps(results["donors"][name], indent=1), flush=True)
            write_json(args.out, "prompt_log", settings, results)
    write_json(args.out, "prompt_log", settings, results)


if __name__ == "__main__":
    main()
