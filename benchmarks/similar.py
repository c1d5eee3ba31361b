"""Prompts made of similar ones: quality, time to first token, and search, by the share of tokens that differ.

    python benchmarks/similar.py --model SmolLM2-135M-Instruct --profile smol.kvp

Quality: made reports of one template, whose values differ between donor and request; the model is asked for one that
differs. The donor's cache as it is answers as the donor's prompt does, so as an answer cache (GPTCache) would. Time:
three such reports as one prompt, loaded over HTTP and an emulated link, in turns with text and with the exact prefix.
Search: made token ids of 100,000 donors behind a store that counts requests. Simulated: see similar_parts/simulated.py;
revisions: see similar_parts/revisions.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from contextlib import closing
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from measure import add_common_options, one_thread, write_json
from similar_parts import revisions, simulated
from test_parts.store_wrappers import CountingStore
from tokenizers import Tokenizer

import kvwire
from kvwire.codec import Profile
from kvwire.reuse import RepairInput, align, repair_prompt, selector_of
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.edit_check import copied, edit
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import Catalog, DonorIndex, MemoryStore
from kvwire.store.base import Listed
from kvwire.store.donors import MOST_OF_FEATURE, SCHEME, sketch
from kvwire.store.index_records import feature_digest
from kvwire.store.records import CatalogEntry
from kvwire.transport import parse_link
from kvwire.transport.testing import serving
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvwire.engines.base import Engine

SHARES = (0.02, 0.05, 0.1, 0.2)
FIRST = "Anna Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Lukas Maria Nora Oscar Paula"
LAST = "Almond Barker Carter Dawson Ellis Fisher Graham Holmes Irving Jensen Keller Lambert Morris Norton Parker"
CITY = "London Paris Madrid Vienna Berlin Dublin Oslo Prague Lisbon Warsaw Athens Geneva"
PLAIN = {
    "city": CITY,
    "branch": CITY,
    "colour": "red blue green yellow black white brown purple orange silver",
    "item": "printer camera bicycle telephone radio heater kettle sofa mirror lamp piano carpet",
    "month": "January February March April May June July August September October November December",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "cause": "water fire smoke frost rust mould dust lightning wind theft",
}
REMARKS = (
    "The door of the room had been left open during the whole night.",
    "A second key was found under the mat by the post.",
    "The insurance of the neighbours has been told about the case.",
    "The lock of the window could not be closed any more.",
    "The bill of the workshop was lost, but a copy could be found.",
    "Two children and a dog were at home on that evening.",
    "The electricity had been switched off for some hours before.",
    "The client had asked for a visit several weeks earlier.",
    "The floor was still wet when the police came to the house.",
    "The stairs to the cellar were repaired only last summer.",
)
ASKED = {
    "client": "What is the name of the client?\nThe name of the client is", "city": "The client lives in the city of",
    "item": "What object was damaged?\nThe damaged object is a", "colour": "The colour of the damaged object is",
    "month": "The claim was received in the month of", "day": "The claim was received on a",
    "cause": "What caused the damage?\nThe damage was caused by", "agent": "The name of the agent is",
    "price": "The price of the damaged object was", "branch": "The branch is in the city of",
}  # fmt: skip
TEMPLATE = """Insurance claim report

This report was written after the visit to the client and describes the damage, the circumstances and the decision.

Claim number: {number}
Name of the client: {client}
Address: {street}, {city}
The claim was received on a {day} in {month}. It was registered by the branch in {branch} and was given to the \
agent {agent}, who visited the client in the same week and took photographs of all rooms. {remark0}

Description of the damage
The damaged object is a {item}. It was bought new three years ago for {price} pounds, and its colour is \
{colour}. According to the client it stood in the living room beside the window and had been in use every day \
until the accident. {remark1} The agent found it in the cellar, where it had been brought for inspection, and \
could confirm that it does not work any more.

Cause of the damage
The client says that the damage was caused by {cause}. The agent found no sign that would speak against this. \
{remark2} The neighbours were asked as well, and they remember the event in the same way. No other objects in \
the house were harmed, and nobody was hurt. {remark3}

Decision
The company accepts the claim. The price of a new object of the same kind will be paid within thirty days after \
the signature of this report, less the usual share of the client. The client was told about the decision and \
agreed to it.
"""


def values(generator: random.Random) -> dict[str, str]:
    """Of all fields of a report."""
    made = {name: generator.choice(words.split()) for name, words in PLAIN.items()}
    for name in ("client", "agent"):
        made[name] = f"{generator.choice(FIRST.split())} {generator.choice(LAST.split())}"
    made |= {f"remark{at}": generator.choice(REMARKS) for at in range(4)}
    made["price"], made["street"] = (
        str(generator.randrange(200, 999)),
        f"{generator.choice(LAST.split())} Street {generator.randrange(2, 99)}",
    )
    return made | {"number": f"{generator.randrange(1000, 9999)}-{generator.randrange(100, 999)}"}


def pair(
    engine: Engine, share: float, generator: random.Random
) -> tuple[list[int], list[int], str, dict[str, str], dict[str, str]]:
    """A donor and a request that differ in about a share of tokens, and the field that is asked."""
    base, other = values(generator), values(generator)
    asked = generator.choice([name for name in ASKED if base[name].split()[0] != other[name].split()[0]])
    rest = [name for name in base if name != asked]
    generator.shuffle(rest)
    if share >= SHARES[-1]:
        rest.sort(key=lambda name: not name.startswith("remark"))
    made = base | {asked: other[asked]}
    donor = engine.tokenize(TEMPLATE.format(**base), place="first")
    for name in rest:
        request = engine.tokenize(TEMPLATE.format(**made), place="first")
        if align([donor], request).computed >= share * len(request):
            break
        made[name] = other[name]
    return donor, engine.tokenize(TEMPLATE.format(**made), place="first"), asked, base, made


def quality(engine: Any, count: int, seed: int, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:  # noqa: ANN401 - any engine
    """What the next token is worth in each way, by share of tokens that differ; all shares in turns."""
    found: dict[float, list[dict[str, Row]]] = {share: [] for share in SHARES}
    differ: dict[float, list[float]] = {share: [] for share in SHARES}
    for number in range(count // len(SHARES)):
        for share in SHARES:
            computed, rows = one_report(engine, *pair(engine, share, random.Random(f"{seed} {share} {number}")))
            differ[share].append(computed)
            found[share].append(rows)
        if number % 5 == 4 or number + 1 == count // len(SHARES):
            out = {f"{share:.0%}": {"differ": fmean(differ[share])} | summed(rows) for share, rows in found.items()}
            out["all"] = summed([row for rows in found.values() for row in rows])
            save(out)
            print(json.dumps(out["all"], indent=1), flush=True)
    return out


class Row(NamedTuple):
    """Of one report in one way: probabilities of both values, divergence, whether the likeliest token is right."""

    request: float
    donor: float
    kl: float
    right: float


def one_report(
    engine: Any, donor: list[int], request: list[int], asked: str, base: dict[str, str], made: dict[str, str]  # noqa: ANN401
) -> tuple[float, dict[str, Row]]:  # fmt: skip
    """The share of tokens that differ, and the next token in each way."""
    question = engine.tokenize("\n" + ASKED[asked], place="last")
    wanted, stale = (engine.tokenize(" " + each[asked], place="last")[0] for each in (made, base))
    script = align([donor], request)
    caches = engine.prefill([donor])[0], engine.prefill([request])[0]
    full = _logs(engine, caches[1], question)
    moved = edit(engine, caches[0], request, script)
    ways = {"full prefill": caches[1], "donor as it is": caches[0], "edited": moved}
    for repaired in (0.15, 0.3):
        ways[f"edited, {repaired:.0%} repaired"] = cache = copied(engine, moved)
        front = max(1, script.front)
        given = RepairInput(engine, cache, tuple(request), (front, len(request) - front), tuple(question))
        if front < len(request):
            repair_prompt(given, selector_of("attention"), repaired)
    rows = {}
    for name, cache in ways.items():
        logs = full if name == "full prefill" else _logs(engine, cache, question)
        kl = max(0.0, float((full.exp() * (full - logs)).sum()))
        rows[name] = Row(
            float(logs[wanted].exp()), float(logs[stale].exp()), kl, float(int(logs.argmax()) == wanted)
        )  # fmt: skip
    return script.computed / len(request), rows


def summed(reports: list[dict[str, Row]]) -> dict[str, Any]:
    """Means of each way, and what it loses against a full prefill of the same report, with 95 % of its uncertainty."""
    out: dict[str, Any] = {"reports": len(reports)}
    for name in reports[0]:
        rows = [report[name] for report in reports]
        out[name] = dict(zip(Row._fields, map(fmean, zip(*rows, strict=True)), strict=True))
        out[name]["kl_median"] = median(row.kl for row in rows)
        for field in ("request", "right"):
            lost = [getattr(report["full prefill"], field) - getattr(report[name], field) for report in reports]
            error = 1.96 * stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else 0.0
            out[name][f"{field}_lost"] = [fmean(lost), error]
    return out


def _logs(engine: Any, cache: Any, question: list[int]) -> torch.Tensor:  # noqa: ANN401 - any engine
    logits = engine.forward(engine.past_key_values(cache), question, cache.tokens, logits=1)
    return torch.log_softmax(logits[-1].double(), -1)


def first_token(engine: Any, profile: Profile, links: list[str], repeats: int, seed: int) -> list[dict[str, Any]]:  # noqa: ANN401
    """Seconds to the first token by text, exact prefix and donors, over each link."""
    generator, out = random.Random(f"{seed}"), []
    cases = {}
    for share in SHARES:
        parts = [pair(engine, share, generator)[:2] for _ in range(3)]
        cases[share] = tuple([token for part in parts for token in part[side]] for side in (0, 1))
    with serving(MemoryStore()) as url, closing(kvwire.open_store(url)) as far:
        corpus = Corpus(engine, far)
        corpus.set_profile(profile)
        for share, (donor, _) in cases.items():
            list(corpus.encode([Document(f"report {share}", tuple(donor))], index=("kvwire", "donors")))
            print("encoded", share, len(donor), flush=True)
        for link in links:
            with Loader(engine, corpus, link=parse_link(link), settings=LoadSettings()) as loader:
                warm = cases[SHARES[0]][0]
                for mode in ("none", "exact", "donors"):  # estimates settle
                    loader.ask_prompt([*warm[:200], 5, *warm[201:400]], reuse=mode)
                for share, (_, request) in cases.items():
                    for _ in range(repeats):
                        row: dict[str, Any] = {"link": link, "share": share, "tokens": len(request)}
                        for mode in ("none", "exact", "donors", "auto"):
                            cpu = time.process_time()
                            answer = loader.ask_prompt(request, reuse=mode)
                            row[mode] = {
                                "ttft_s": answer.timing.ttft_s, "cpu_s": time.process_time() - cpu,
                                "bytes": answer.bytes,
                                "loaded": answer.reused.loaded, "holes": answer.reused.holes,
                                "repaired": answer.reused.repaired, "predicted_s": answer.predicted_s,
                            }  # fmt: skip
                        out.append(row)
                        print(json.dumps(row), flush=True)
    return out


class Kept(MemoryStore):
    """A bucket of donors that is asked as any other; entries and texts are made when they are read."""

    is_local = False

    def __init__(self) -> None:
        """Keep nothing yet."""
        super().__init__()
        self._space = Catalog(self).keys("ab" * 32)
        self._texts: dict[str, Sequence[int] | int] = {}
        self._features: dict[str, list[str]] = {}

    def add(self, ids: Sequence[int], kept: Sequence[int] | int | None = None) -> None:
        """Sketch a donor. kept: in place of its text, which ``text`` makes again."""
        digest = digest_tokens(ids)
        if digest in self._texts:
            return
        self._texts[digest] = ids if kept is None else kept
        for feature in sketch(ids):
            named = self._features.setdefault(feature_digest(SCHEME, feature), [])
            if len(named) < MOST_OF_FEATURE:
                named.append(digest)

    def text(self, kept: Any) -> Sequence[int]:  # noqa: ANN401 - what ``add`` was given
        """A donor's text."""
        return kept  # type: ignore[no-any-return]

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """List a feature's donors."""
        found = self._features.get(prefix.rstrip("/").rpartition("/")[2], [])
        return iter([Listed(f"{prefix}{digest}.json", 200, 1.0) for digest in sorted(found) if digest > after])

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """An entry or a text."""
        from kvwire.codec import pack_text

        digest = key.rpartition("/")[2].partition(".")[0]
        if digest not in self._texts:
            return super().get(key, start, end)
        ids = self.text(self._texts[digest])
        if key.endswith(".kvt"):
            return pack_text(list(ids), [])[start:end]
        sha = hashlib.sha256(digest.encode()).hexdigest()
        entry = CatalogEntry(digest, self._space.blob(sha), sha, 100, 50, len(ids), digest, "", ())
        return entry.to_json()[start:end]


class MadeUp(Kept):
    """Very many donors, made of random templates."""

    def __init__(self, donors: int, tokens: int, family: int) -> None:
        """Sketch all of them. family: donors of one template."""
        super().__init__()
        self._tokens, self._family = tokens, family
        for number in range(donors):
            self.add(self.text(number), number)

    def text(self, kept: int, seed: int = 0) -> list[int]:
        """Of a donor by its number: that of its template, with a tenth of its tokens in runs of its own."""
        ids = np.random.default_rng(kept // self._family).integers(0, 49_152, self._tokens)
        own = np.random.default_rng((seed, kept, 1))
        for at in own.integers(0, self._tokens - 4, self._tokens // 40):
            ids[at : at + 4] = own.integers(0, 49_152, 4)
        return [int(each) for each in ids]


def search(donors: int, tokens: int) -> dict[str, Any]:
    """Requests and milliseconds of a search among very many donors, and how often the best is found."""
    started = time.perf_counter()
    store = MadeUp(donors, tokens, 50)
    print(f"sketched {donors} in {time.perf_counter() - started:.1f} s", flush=True)
    counting = CountingStore(store)
    catalog = Catalog(counting)
    index, cold, warm, requests, found = DonorIndex(catalog, "ab" * 32), [], [], [], []
    for asked in range(0, donors, max(1, donors // 100)):
        request = store.text(asked, seed=1)
        counting.reset()
        began = time.perf_counter()
        donors_of = index.find(request)
        cold.append(1e3 * (time.perf_counter() - began))
        requests.append(counting.tally().requests)
        began = time.perf_counter()
        donors_of = index.find(request)
        warm.append(1e3 * (time.perf_counter() - began))
        share = max((align([each.token_ids], request).reused / tokens for each in donors_of), default=0.0)
        others = range(asked - asked % 50, asked - asked % 50 + 50)
        best = max(align([store.text(other)], request).reused / tokens for other in others)
        found.append((share, best))
    return {
        "donors": donors, "tokens": tokens, "requests": max(requests), "requests_median": median(requests),
        "cold_ms": median(cold), "warm_ms": median(warm), "found": sum(share > 0 for share, _ in found) / len(found),
        "reused": fmean(share for share, _ in found), "reused_by_brute_force": fmean(best for _, best in found),
    }  # fmt: skip


def draw(results: dict[str, Any], path: Path, model: str) -> None:
    """KL divergence and time to first token, by share of tokens that differ."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    links = list(dict.fromkeys(row["link"] for row in results["first_token"]))
    figure, axes = plt.subplots(1, 1 + len(links), figsize=(5 * (1 + len(links)), 4.2))
    by_share = [each for share, each in results["quality"].items() if share != "all"]
    shares = [100 * each["differ"] for each in by_share]
    labels = {"donor as it is": "donor as it is, and answers of GPTCache"}
    for name in ("donor as it is", "edited", "edited, 15% repaired", "edited, 30% repaired"):
        kls = [max(1e-5, each[name]["kl"]) for each in by_share]
        axes[0].plot(shares, kls, "o-", label=labels.get(name, name))
    axes[0].set(
        yscale="log",
        xlabel="tokens that differ (%)",
        ylabel="KL divergence from a full prefill (nats)",
        title=f"{model}, reports of some 340 tokens",
    )
    axes[0].legend()
    names = {"none": "text", "exact": "exact prefix", "donors": "donors", "auto": "auto"}
    for axis, link in zip(axes[1:], links, strict=True):
        rows = [row for row in results["first_token"] if row["link"] == link]
        for mode, label in names.items():
            by = [
                (share, median(row[mode]["ttft_s"] / row["none"]["ttft_s"] for row in rows if row["share"] == share))
                for share in SHARES
            ]
            axis.plot(
                [100 * share for share, _ in by],
                [ratio for _, ratio in by],
                "o--" if mode == "auto" else "o-",
                label=label,
            )
        axis.set(xlabel="tokens that differ (%)", ylabel="time to first token / text", ylim=(0, None))
        axis.set_title(f"{model}, {link}/s, 1,070 tokens")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, draw and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "similar")
    parser.add_argument("--name", default="", help="what the model is called in the results")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--reports", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--links", nargs="*", default=["50mbit", "500mbit"])
    parser.add_argument("--donors", type=int, default=100_000)
    parser.add_argument("--parts", nargs="*", default=["search", "quality", "first_token", "revisions", "simulated"])
    parser.add_argument("--revisions", type=int, default=21)
    args = parser.parse_args()
    one_thread()
    known = json.loads(args.out.read_text())["results"] if args.out.exists() else {}
    settings = {
        "reports": args.reports,
        "repeats": args.repeats,
        "links": args.links,
        "model": args.name or args.model.name,
        "seed": args.seed,
    }
    results: dict[str, Any] = {}
    if "search" in args.parts:
        results["search"] = search(args.donors, 400)
        print(results["search"], flush=True)
    if "simulated" in args.parts:
        results["simulated"] = simulated.rows()
    if set(args.parts) & {"quality", "first_token", "revisions"}:
        engine = kvwire.open_engine(str(args.model))
        if "quality" in args.parts:

            def save(quality: dict[str, Any]) -> None:
                write_json(args.out, "similar", settings, known | results | {"quality": quality})

            results["quality"] = quality(engine, args.reports, args.seed, save)
        if "first_token" in args.parts:
            profile = Profile.from_bytes(args.profile.read_bytes())
            results["first_token"] = first_token(engine, profile, args.links, args.repeats, args.seed)
        if "revisions" in args.parts:
            profile, tokenizer = (
                Profile.from_bytes(args.profile.read_bytes()),
                Tokenizer.from_file(str(args.model / "tokenizer.json")),
            )
            rows = revisions.asked_in_turn(engine, profile, revisions.revisions(tokenizer, args.revisions))
            results["revisions"] = {"requests": rows, "summed": revisions.summed(rows)}
            print(results["revisions"]["summed"], flush=True)
    results = known | results
    write_json(args.out, "similar", settings, results)
    if {"quality", "first_token"} <= results.keys():
        draw(results, args.out.with_suffix(".png"), args.name or args.model.name)


if __name__ == "__main__":
    main()
