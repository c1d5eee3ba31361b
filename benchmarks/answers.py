"""Answers that a real model gives over linked documents: exact match, F1, KL divergence, and the same greedy text.

    python benchmarks/answers.py --model FOLDER
    python benchmarks/answers.py --model FOLDER --questions 0      # times the first tokens alone, beside saved answers
    python benchmarks/answers.py --model FOLDER --timed 0          # asks anew beside saved times

Each prompt is a question in the model's chat template behind four or five passages of other questions (NaturalQuestions
with its gold passage). The reference is a full prefill; its greedy answer is fed to every other way, so a way gives the
same text exactly where it prefers each of these tokens too. Times to the first token are those of ``Loader.ask`` on six
MuSiQue passages over an emulated link; the picture puts the divergence over them.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import re
import statistics
import string
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import RESULTS, SHARED, books, table, windows_in, write_json
from tqdm import tqdm
from transformers import DynamicCache

import kvwire
from kvwire import Chat, KVCache, link
from kvwire.comparison.baselines import text_ttft
from kvwire.comparison.run import local_server
from kvwire.reuse import RepairInput, repair_prompt, selector_of
from kvwire.runtime.coding import Coding
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.loader import Loader
from kvwire.runtime.prefill import compute_documents
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore, open_store
from kvwire.transport import LinkSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire import Profile, TransformersEngine
    from kvwire.types import RenderedChat

SYSTEM = "Answer the question in a few words, from the documents alone."
ANSWER_TOKENS = 20
FULL, NOTHING, BLIND, BEHIND = "full prefill", "no documents", "linked", "behind a neutral text"
NEUTRAL = 64
"""Tokens of it."""
ROUNDED, STORED = "full prefill, bfloat16 cache", "full prefill, cache at the default level"
"""Nothing is linked: how far the greedy text of a small model moves by rounding its cache, and by the codec alone."""
SHARES = (0.05, 0.15, 0.3, 0.5)
CODED = 0.15
"""Rows repaired of coded levels."""
PAPERS = {"CacheBlend": "cacheblend", "EPIC": "first"}
"""Selectors of others."""


def passages(rng: random.Random, rows: list[dict[str, Any]], count: int) -> tuple[dict[str, Any], list[str]]:
    """A question, and its gold passage among those of others."""
    asked, *others = rng.sample(rows, count)
    texts = [_passage(row) for row in (asked, *others)]
    rng.shuffle(texts)
    return asked, texts


def _passage(row: dict[str, Any]) -> str:
    found = row["ctxs"] if isinstance(row["ctxs"], list) else ast.literal_eval(row["ctxs"])
    return f"{found[0]['title']}\n{found[0]['text']}\n"


def normal(text: str) -> list[str]:
    """Words as question sets compare them: lower case, no punctuation, no articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


SCORES = ("em", "within", "f1")


def scores(answer: str, right: Sequence[str]) -> tuple[float, float, float]:
    """Exact match, a right answer within the text, and F1 against the nearest right answer."""
    words = normal(answer)
    best = 0.0
    padded = f" {' '.join(words)} "
    within = any(f" {' '.join(normal(each))} " in padded for each in right)
    for each in right:
        wanted = normal(each)
        common = sum((Counter(words) & Counter(wanted)).values())
        best = max(best, 2 * common / (len(words) + len(wanted)) if common else 0.0)
    return float(any(words == normal(each) for each in right)), float(within), best


class Asked:
    """One question, its documents, and what a full prefill makes of it."""

    def __init__(self, engine: TransformersEngine, texts: Sequence[str], question: str) -> None:
        """Compute the reference."""
        self.engine = engine
        self.chat: RenderedChat = engine.render_chat(Chat(system=SYSTEM), f"\nQuestion: {question}")
        self.documents = [engine.tokenize(text) for text in texts]
        self.ids = (*self.chat.head, *(token for ids in self.documents for token in ids))
        self.lengths = (len(self.chat.head), *(len(ids) for ids in self.documents))
        (self.full,) = engine.prefill([self.ids])
        (self.head,) = engine.prefill([self.chat.head])
        (self.answer,) = self.generated([self.full])
        (self.log_p,) = self.expected([self.full])

    def linked(self, caches: Sequence[KVCache]) -> KVCache:
        """Documents behind the template's head."""
        return link([self.head, *caches])

    def repaired(self, linked: KVCache, selector: str, share: float) -> KVCache:
        """A copy with some rows computed anew."""
        cache = replace(linked, keys=[k.clone() for k in linked.keys], values=[v.clone() for v in linked.values])
        given = RepairInput(self.engine, cache, self.ids, self.lengths, self.chat.tail)
        repair_prompt(given, selector_of(selector), share)
        return cache

    @torch.no_grad()
    def expected(self, caches: Sequence[KVCache]) -> torch.Tensor:
        """Float64 log-probabilities ``[caches, answer, vocabulary]`` behind the question, the answer being fed."""
        follows = [*self.chat.tail, *self.answer[:-1]]
        out = self._run(_past(caches), [follows] * len(caches), caches[0].tokens, len(self.answer))
        return torch.log_softmax(out.double(), -1)

    @torch.no_grad()
    def generated(self, caches: Sequence[KVCache]) -> list[tuple[int, ...]]:
        """Greedy answers up to the end of the turn."""
        past, at = _past(caches), caches[0].tokens
        ids: list[list[int]] = [list(self.chat.tail)] * len(caches)
        found: list[list[int]] = [[] for _ in caches]
        for _ in range(ANSWER_TOKENS):
            logits = self._run(past, ids, at, 1)
            at += len(ids[0])
            ids = [[int(row[-1].argmax())] for row in logits]
            for each, (token,) in zip(found, ids, strict=True):
                each.append(token)
            if all(self.chat.stop & set(each) for each in found):
                break
        ends = [next((n for n, t in enumerate(each) if t in self.chat.stop), len(each) - 1) for each in found]
        return [tuple(each[: end + 1]) for each, end in zip(found, ends, strict=True)]

    def _run(self, past: DynamicCache, ids: list[list[int]], at: int, keep: int) -> torch.Tensor:
        positions = torch.arange(at, at + len(ids[0])).expand(len(ids), -1)
        return self.engine.model(
            input_ids=torch.tensor(ids), position_ids=positions, past_key_values=past, use_cache=True,
            logits_to_keep=keep,
        ).logits  # fmt: skip

    def text(self, ids: Sequence[int]) -> str:
        """An answer in words."""
        return self.engine.detokenize([token for token in ids if token not in self.chat.stop], special=False).strip()


def _past(caches: Sequence[KVCache]) -> DynamicCache:
    layers = range(len(caches[0].keys))
    return DynamicCache(
        ddp_cache_data=[
            (torch.stack([c.keys[i] for c in caches]), torch.stack([c.values[i] for c in caches])) for i in layers
        ]
    )


def ways(
    asked: Asked, profile: Profile, args: argparse.Namespace, level: str, *, every: bool
) -> Iterator[tuple[str, KVCache]]:
    """The prompt's cache by each way, all of the same length; ``every``: also at each level, and as papers repair."""
    engine = asked.engine
    documents = engine.prefill(asked.documents)
    blind, behind = asked.linked(documents), asked.linked(compute_documents(engine, asked.documents, NEUTRAL))
    yield BLIND, blind
    yield BEHIND, behind
    for each in SHARES[:2]:
        yield f"{BEHIND}, {each:.0%} repaired", asked.repaired(behind, "attention", each)
    yield ROUNDED, rounded(asked.full)
    for each in SHARES:
        yield f"{each:.0%} repaired", asked.repaired(blind, "attention", each)
    blobs = [kvwire.encode(cache, profile) for cache in documents]
    for index, each in enumerate(kvwire.inspect(blobs[0]).levels):
        if each.name == level:
            whole = kvwire.encode(asked.full, profile)
            yield STORED, kvwire.decode(whole, index, profile, dtype=torch.float32)
        if every or each.name == level:
            coded = asked.linked([kvwire.decode(blob, index, profile, dtype=torch.float32) for blob in blobs])
        if every:
            yield f"level {index}, linked", coded
            yield f"level {index}, {CODED:.0%} repaired", asked.repaired(coded, "attention", CODED)
        if each.name == level:
            yield "default", asked.repaired(coded, args.selector, args.share)
    for name, other in PAPERS.items() if every else ():
        yield f"{name} {CODED:.0%}", asked.repaired(blind, other, CODED)


def rounded(cache: KVCache) -> KVCache:
    """A copy whose entries went through bfloat16."""
    keys, values = ([each.bfloat16().float() for each in side] for side in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)


def judged(asked: Asked, right: Sequence[str], caches: dict[str, KVCache]) -> dict[str, dict[str, float]]:
    """Figures of each way."""
    out = {FULL: dict(zip(SCORES, scores(asked.text(asked.answer), right), strict=True)) | {"kl": 0.0, "same": 1}}
    names = list(caches)
    for some in ([NOTHING], [name for name in names if name != NOTHING]):
        log_q = asked.expected([caches[name] for name in some])
        kl = (asked.log_p.exp() * (asked.log_p - log_q)).sum(-1).mean(-1).tolist()
        same = (log_q.argmax(-1) == torch.tensor(asked.answer)).all(-1).tolist()
        other = [name for name, is_same in zip(some, same, strict=True) if not is_same]
        answers = dict(zip(other, asked.generated([caches[name] for name in other]), strict=True)) if other else {}
        for name, each, is_same in zip(some, kl, same, strict=True):
            right_by = dict(zip(SCORES, scores(asked.text(answers.get(name, asked.answer)), right), strict=True))
            out[name] = right_by | {"kl": each, "same": float(is_same)}
    return out


def summed(found: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over questions; of the divergence what is closed of linking, with its interval."""
    out = {}
    for name in found[0]:
        asked = [each for each in found if name in each]
        rows, before = [each[name] for each in asked], [each[BLIND]["kl"] for each in asked]
        kls = [row["kl"] for row in rows]
        apart = [ours - theirs for ours, theirs in zip(kls, before, strict=True)]
        out[name] = {key: statistics.fmean(row[key] for row in rows) for key in (*SCORES, "kl", "same")}
        out[name] |= {
            "n": len(rows),
            "kl_median": statistics.median(kls),
            "closed": 1 - statistics.fmean(kls) / statistics.fmean(before),
            "kl_less_95": 1.96 * statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0,
            "same_95": 1.96 * (out[name]["same"] * (1 - out[name]["same"]) / len(rows)) ** 0.5,
        }
    return out


def first_tokens(
    engine: TransformersEngine, profile: Profile, args: argparse.Namespace, share: float
) -> dict[str, Any]:
    """Seconds to the first token of prompts of six long passages, by way, over the link; ways take turns."""
    rows = json.loads((SHARED / "text" / "qa" / "musique_s.json").read_text(encoding="utf-8"))
    settings = {
        "linked": LoadSettings(repair="none"), **{f"{each:.0%} repaired": LoadSettings(repair=each) for each in SHARES},
        "default": LoadSettings(repair=share),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in (FULL, *settings)}
    network = LinkSettings(bandwidth_bytes_s=args.mbit * 1e6 / 8, rtt_s=0.02)
    tokens = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(engine, open_store(folder))
        corpus.set_profile(profile)
        prompts = []
        for number, row in enumerate(rows[: args.timed]):
            texts = [f"{passage['text']}\n" for passage in row["ctxs"][:6]]
            documents = [Document(f"{number}-{n}", tuple(engine.tokenize(text))) for n, text in enumerate(texts)]
            list(corpus.encode(documents))
            prompts.append(
                ([each.document_id for each in documents], [d.token_ids for d in documents], row["question"])
            )
        with local_server(folder) as url:
            remote = Corpus(engine, open_store(url))
            loaders = {
                name: Loader(engine, remote, link=network, memory=EstimatesFile(None), settings=each)
                for name, each in settings.items()
            }
            for ids, texts, question in tqdm(prompts, unit="prompt", disable=None, desc="first tokens"):
                chat = Chat(system=SYSTEM)
                rendered = engine.render_chat(chat, f"\nQuestion: {question}")
                whole = [[*rendered.head], *texts]
                tokens.append(sum(map(len, whole)) + len(rendered.tail))
                seconds[FULL].append(text_ttft(engine, whole, rendered.tail))
                for name, loader in loaders.items():
                    seconds[name].append(loader.ask(ids, f"\nQuestion: {question}", chat=chat).timing.ttft_s)
            for loader in loaders.values():
                loader.close()
    text = seconds[FULL]
    return {
        "prompts": len(text), "tokens": statistics.median(tokens), "mbit_s": args.mbit,
        "ways": {
            name: {"ttft_s": statistics.median(each), "of_text": statistics.median(
                ours / theirs for ours, theirs in zip(each, text, strict=True))}
            for name, each in seconds.items()
        },
    }  # fmt: skip


def draw(results: dict[str, Any], path: Path) -> None:
    """KL divergence over the time to the first token."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    timed, answers = results["first_tokens"]["ways"], results["answers"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    names = [name for name in timed if name in answers and name != FULL]
    for name in names:
        share, row = 100 * timed[name]["of_text"], answers[name]
        axes.plot(share, row["kl"], "o", color="tab:red" if name == "default" else "tab:blue")
        axes.annotate(f"{name}: {row['same']:.0%} same text", (share, row["kl"]),
                      xytext=(-6 if share > 60 else 6, 5 if name == "default" else -11),
                      ha="right" if share > 60 else "left",
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.axhline(answers[NOTHING]["kl"], color="grey", linestyle=":", label=NOTHING)
    axes.set(yscale="log", xlim=(0, 105), xlabel="time to first token, % of a full prefill's",
             ylabel="KL divergence from a full prefill, nats a token")  # fmt: skip
    axes.set_title(f"{results['model']}, {results['questions']} questions; {results['first_tokens']['tokens']:.0f} "
                   f"tokens at {results['first_tokens']['mbit_s']:g} Mbit/s", fontsize=9)  # fmt: skip
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Ask, judge, print, draw and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a chat model")
    parser.add_argument("--name", default="", help="what the model is called in the results")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument(
        "--timed", type=int, default=6, help="prompts of 3,000 tokens whose first token is timed; 0: none"
    )
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--share", type=float, default=0.15, help="rows that the default repairs")
    parser.add_argument("--selector", default="attention")
    parser.add_argument(
        "--every", type=int, default=10, help="questions that are also asked at each level and by other selectors"
    )
    parser.add_argument("--profile", type=Path, help="of kvwire profile fit; else one is fitted on books and wikitext")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "answers.json")
    args, began = parser.parse_args(), time.perf_counter()
    before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else None
    saved = None if args.questions else before
    if saved:
        for name in ("seed", "share", "selector"):
            setattr(args, name, saved["settings"][name])
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    profile = fitted(engine, args)
    level = kvwire_level(engine, profile)
    with gzip.open(SHARED / "text" / "qa" / "nq-open-oracle.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if row["answers"]]
    results: dict[str, Any] = {"model": args.name or args.model.name, "default_level": level}
    if saved:
        results = saved["results"]
        results["answers_commit"] = results.get("answers_commit", saved["machine"].get("commit", ""))
    if args.timed or not before:
        results["first_tokens"] = first_tokens(engine, profile, args, args.share)
    else:
        results["first_tokens"] = before["results"]["first_tokens"]
    print(results["first_tokens"], flush=True)
    rng, found = random.Random(args.seed), []
    for number in tqdm(range(args.questions), unit="question", disable=None, file=sys.stderr):
        row, texts = passages(rng, rows, 4 + number % 2)
        asked = Asked(engine, texts, f"{row['question'].capitalize()}?")
        caches = {NOTHING: asked.head} | dict(ways(asked, profile, args, level, every=number < args.every))
        found.append(judged(asked, row["answers"], caches))
        if number % 10 == 9:
            told = {name: (round(each["kl"], 4), round(each["same"], 2)) for name, each in summed(found).items()}
            print(number + 1, told, flush=True)
    if found:
        results["questions"], results["answers"] = len(found), summed(found)
    settings = {"seed": args.seed, "share": args.share, "selector": args.selector, "answer_tokens": ANSWER_TOKENS,
                "seconds": time.perf_counter() - began}  # fmt: skip
    write_json(args.out, "answers", settings, results)
    if "answers" in results:
        show(results)
        draw(results, args.out.with_suffix(".png"))


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    timed = results["first_tokens"]["ways"]
    lines = []
    for name, row in results["answers"].items():
        ttft = timed.get(name)
        first = f"{ttft['ttft_s']:.2f}, {ttft['of_text']:.0%}" if ttft else ""
        lines.append([
            name, str(row["n"]), *(f"{row[key]:.3f}" for key in SCORES), f"{row['kl']:.4f}", f"{row['closed']:.1%}",
            f"{row['same']:.0%} +- {row['same_95']:.0%}", first,
        ])  # fmt: skip
    print(table(["way", "n", "EM", "within", "F1", "KL", "closed", "same text", "first token, s"], lines))


def fitted(engine: TransformersEngine, args: argparse.Namespace) -> Profile:
    """A profile of books and an encyclopaedia, as encoding fits one."""
    if args.profile:
        return kvwire.Profile.from_bytes(args.profile.read_bytes())
    wiki = SHARED / "text" / "heldout" / "wikitext2-test.txt"
    chosen = random.Random(args.seed).sample(books(), 10)
    texts = [windows_in(engine, path.read_text(encoding="utf-8"), path.name, 1, 1024, args.seed)[0] for path in chosen]
    texts += windows_in(engine, wiki.read_text(encoding="utf-8"), wiki.name, 4, 1024, args.seed)
    corpus = Corpus(engine, MemoryStore(), coding=Coding())
    profile = corpus.calibrate([Document(str(n), tuple(ids)) for n, ids in enumerate(texts)], tokens=12 * 1024)
    assert isinstance(profile, kvwire.Profile)
    return profile


def kvwire_level(engine: TransformersEngine, profile: Profile) -> str:
    """The level that loads take by themselves: the coarsest that is predicted within ``LoadSettings.max_kl``."""
    (cache,) = engine.prefill([engine.tokenize("The quick brown fox jumps over the lazy dog. " * 60)])
    levels = kvwire.inspect(kvwire.encode(cache, profile)).levels
    good = [each.name for each in levels if (each.predicted_kl or 0.0) <= (LoadSettings().max_kl or 0.0)]
    return good[0] if good else levels[-1].name


if __name__ == "__main__":
    main()
