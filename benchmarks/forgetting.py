"""What forgetting costs in hits: ``kvwire store gc --keep`` against LRU, LFU and Belady on a made log of conversations.

The log is made, not recorded: 60 system texts of Zipf popularity, conversations of 1 to 20 turns that pause for
exponentially distributed times, over 30 simulated days. kvwire sees uses by the hour (``LastUses``), forgets whole
saved documents, every six hours, and never what was used within a day; the others evict single parts, leaves first,
every 20 requests, and know each use; Belady knows the future. The share of prompt tokens that were found is compared.
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from measure import RESULTS, write_json

from kvwire.store.catalog.last_uses import MARK_EVERY_S
from kvwire.store.upkeep.forget import Stored, choose

if TYPE_CHECKING:
    from collections.abc import Callable

DAY = 86400.0
GRACE_S, GC_EVERY_S = DAY, DAY / 4
EVICT_EVERY = 20
BYTES_PER_TOKEN = 4000  # of a blob; the same for all, so that it does not matter


@dataclass(frozen=True)
class Request:
    """One turn: parts that it begins with, and the part that it adds; each part by name, with its tokens."""

    at: float
    document: str
    parts: tuple[tuple[str, int], ...]


def made_log(requests: int, seed: int) -> list[Request]:
    """Turns of all conversations, in the order of time."""
    draw = random.Random(seed)
    systems = [(f"system {number}", draw.randrange(100, 2000)) for number in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    out, numbers = [], count()
    while len(out) < requests:
        name, at = f"sessions/{next(numbers)}", draw.uniform(0, 30 * DAY)
        parts = [draw.choices(systems, weights)[0]]
        pause_s = draw.choice((60.0, 3600.0, DAY))
        for turn in range(draw.randint(1, 20)):
            parts.append((f"{name} {turn}", draw.randrange(20, 400)))
            out.append(Request(at, name, tuple(parts)))
            at += draw.expovariate(1 / pause_s)
    return sorted(out, key=lambda request: request.at)[:requests]


@dataclass
class Hits:
    """Tokens that were asked for again and those that were found; bytes that were held, at most and on average."""

    asked: int = 0
    found: int = 0
    held: list[int] = field(default_factory=list)

    def take(self, request: Request, held: dict[str, int]) -> None:
        """Count the prompt's longest beginning that is held; its last part is new."""
        hit = True
        for part, tokens in request.parts[:-1]:
            hit = hit and part in held
            self.asked += tokens
            self.found += tokens * hit


def kvwire_hits(log: list[Request], keep_bytes: float) -> Hits:
    """What ships: ``choose`` by marks and entries, every six hours."""
    hits, marked, documents = Hits(), dict[str, float](), dict[str, Request]()
    sizes: dict[str, int] = {}
    held: dict[str, int] = {}
    due = GC_EVERY_S
    for request in log:
        while request.at >= due:
            stored = [
                Stored(name, tuple(part for part, _ in last.parts), marked[name], marked[name] < due - GRACE_S)
                for name, last in documents.items()
            ]
            for gone, _ in choose(stored, sizes, keep_bytes, due - GRACE_S):
                del documents[gone.key]
            held = {part: size for last in documents.values() for part, size in last.parts}
            sizes = {part: tokens * BYTES_PER_TOKEN for part, tokens in held.items()}
            hits.held.append(sum(sizes.values()))
            due += GC_EVERY_S
        hits.take(request, held)
        head = f"prompts/{request.parts[0][0]}"
        documents[request.document] = request
        documents[head] = Request(request.at, head, request.parts[:1])
        for name in (request.document, head):
            if request.at - marked.get(name, -DAY) >= MARK_EVERY_S:
                marked[name] = request.at
        held.update(request.parts)
        sizes.update((part, tokens * BYTES_PER_TOKEN) for part, tokens in request.parts)
    return hits


def evicting_hits(log: list[Request], keep_bytes: float, worth: Callable[[str, int], float]) -> Hits:
    """Single parts, leaves first, the least worth first."""
    hits, held = Hits(), dict[str, int]()
    before: dict[str, str] = {}
    children: dict[str, int] = {}
    for number, request in enumerate(log):
        hits.take(request, held)
        previous = ""
        for part, tokens in request.parts:
            if part not in held:
                held[part] = tokens
                before[part] = previous
                children[previous] = children.get(previous, 0) + 1
            previous = part
        if number % EVICT_EVERY:
            continue
        total = sum(held.values()) * BYTES_PER_TOKEN
        leaves = [(worth(part, number), part) for part in held if not children.get(part)]
        heapify(leaves)
        while total > keep_bytes:
            gone = heappop(leaves)[1]
            total -= held.pop(gone) * BYTES_PER_TOKEN
            parent = before[gone]
            children[parent] -= 1
            if parent and not children[parent]:
                heappush(leaves, (worth(parent, number), parent))
        hits.held.append(total)
    return hits


def uses_of(log: list[Request]) -> dict[str, list[int]]:
    """For each part the numbers of the requests that begin with it."""
    uses: dict[str, list[int]] = {}
    for number, request in enumerate(log):
        for part, _ in request.parts:
            uses.setdefault(part, []).append(number)
    return uses


def main() -> None:
    """Run all policies at three sizes and save what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "forgetting.json")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.seeds):
        log = made_log(arguments.requests, seed)
        uses = uses_of(log)
        whole = sum({part: tokens for request in log for part, tokens in request.parts}.values()) * BYTES_PER_TOKEN

        def recent(part: str, now: int, uses: dict[str, list[int]] = uses) -> float:
            return uses[part][bisect(uses[part], now) - 1]

        def often(part: str, now: int, uses: dict[str, list[int]] = uses) -> float:
            return bisect(uses[part], now)

        def future(part: str, now: int, uses: dict[str, list[int]] = uses) -> float:
            later = bisect(uses[part], now)
            return -uses[part][later] if later < len(uses[part]) else -inf

        for share in (0.1, 0.2, 0.4):
            keep = share * whole
            ours = kvwire_hits(log, keep)
            mean = sum(ours.held) / len(ours.held)
            row = {"seed": seed, "share": share, "kvwire": ours.found / ours.asked, "kvwire_held": mean / whole}
            for name, worth in (("lru", recent), ("lfu", often), ("belady", future)):
                other = evicting_hits(log, keep, worth)
                row[name] = other.found / other.asked
            row["of_lru"] = row["kvwire"] / row["lru"]
            rows.append(row)
            print({name: round(value, 3) for name, value in row.items()})
    write_json(arguments.out, "forgetting", {"log": "made", "requests": arguments.requests}, {"rows": rows})


if __name__ == "__main__":
    main()
