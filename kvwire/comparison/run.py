"""The comparison that ``kvwire demo`` runs: text recompute, raw KV and kvwire over emulated links.

Everything but the link is real: documents are encoded into a store in a folder, a separate server process serves them
on loopback, and every load goes over HTTP through a token bucket with a round trip.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire._json import strict_json
from kvwire.comparison.baselines import RawCaches, text_ttft
from kvwire.comparison.tables import answer_lines, link_table, repair_table
from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.runtime.coding import Coding, Document
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.costs import measure_costs
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import Reference
from kvwire.runtime.settings import LoadSettings
from kvwire.runtime.text_files import problem_with, token_ids
from kvwire.store.schemes import open_store
from kvwire.transport import parse_link
from kvwire.types import Chat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvwire.controller import CostModel
    from kvwire.engines.base import Engine
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.settings import RepairMode
    from kvwire.store import Store
    from kvwire.transport import LinkSettings

LINKS = ("slow=10mbit,60ms", "middling=50mbit,20ms", "fast=500mbit,5ms")
DEADLINE_SHARE = 0.5
"""The deadline, as a share of the measured time of recomputing from text, so that it suits every machine."""
REPAIR = 0.15
"""Share of rows repaired in a second run, to show what linking without repair loses."""
ANSWER_REPAIR = 0.3
"""The same for the answers shown."""
_SAID_TOKENS = 24
_TIMED = ("fetch_s", "decode_s", "recompute_s", "link_s", "query_s")
_REPEATS = 5
_RAW_BUDGET_S = 8.0
"""Raw caches are loaded again for a median only if that takes less than this in total."""
_ANSWER_TOKENS = 32
SYSTEM = "Answer in a few words, from the documents alone."
"""System prompt of chat models."""
_QUESTION = "\n\nWhen all this had been told, it was plain that"


@dataclass(frozen=True)
class Prompt:
    """Documents by id, and a question or text to continue."""

    documents: tuple[str, ...]  # their ids, in order
    question: tuple[int, ...]  # token ids
    asked: str = ""  # the question's text if the model answers in its chat template; empty if it continues text
    right: str = ""  # the right answer, if known
    head: tuple[int, ...] = ()  # token ids of the template before the documents
    stop: frozenset[int] = frozenset()  # token ids that end the answer

    def ask(self, loader: Loader, **how: Any) -> Answer:  # noqa: ANN401 - of ``Loader.ask``
        """Ask a loader."""
        if self.asked:
            return loader.ask(self.documents, self.asked, chat=Chat(system=SYSTEM), **how)
        return loader.ask(self.documents, self.question, **how)


def run_demo(
    engine: Engine,
    texts: Mapping[str, str],
    *,
    questions: str | None = None,
    out: Path,
    links: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Encode, serve, and answer over each link in three ways; writes ``demo.json`` and ``demo.png``.

    more: Texts added when fitting the profile, for few documents.
    """
    named = [_named_link(link) for link in (links or LINKS)]
    tokens = _fitting(engine, texts, say)
    prompts = _prompts(engine, tokens, questions)
    with tempfile.TemporaryDirectory(prefix="kvwire-demo-") as folder:
        store = open_store(folder)
        encoded = _encode(engine, store, tokens, _fitting(engine, more, say) if more else {}, say)
        raw = RawCaches.write(store, engine, tokens)
        references = [
            Reference.of(engine, [tokens[d] for d in p.documents], p.question, _ANSWER_TOKENS, head=p.head)
            for p in prompts
        ]
        with local_server(folder) as url, closing(open_store(url)) as remote:
            comparison = _Comparison(engine, remote, tokens, prompts, references, raw)
            comparison.text()  # warms the engine up
            text_s = statistics.median(comparison.text() for _ in range(3))
            deadline = DEADLINE_SHARE * text_s
            count = len(prompts[0].documents)
            say(f"\nprompt: {comparison.prompt_tokens} tokens in {count} documents; deadline {deadline:.2f} s")
            rows = [comparison.over(name, link, deadline) for name, link in named]
            answers = comparison.answers(named[-1][1])
    linking_kl = references[0].linking_kl
    report: dict[str, Any] = {
        "links": rows, "encode": encoded, "deadline_s": deadline, "prompt_tokens": comparison.prompt_tokens,
        "answers": answers, "linking": {"kl_of_linked_to_full_prefill": linking_kl},
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.json").write_text(json.dumps(report, indent=1) + "\n")
    for line in (link_table(rows), repair_table(linking_kl, rows, REPAIR), *answer_lines(answers, ANSWER_REPAIR)):
        say(line)
    _draw(report, out / "demo.png", say)
    return report


class _Comparison:
    """One engine, one server, and three ways to the first token."""

    def __init__(
        self, engine: Engine, store: Store, tokens: Mapping[str, Sequence[int]], prompts: Sequence[Prompt],
        references: Sequence[Reference], raw: RawCaches,
    ) -> None:  # fmt: skip
        self._engine, self._corpus = engine, Corpus(engine, store)
        self._tokens, self._prompts, self._references, self._raw = tokens, prompts, references, raw
        self._costs: CostModel = measure_costs(engine, self._corpus.profile())

    def _loader(self, link: LinkSettings, repair: RepairMode | float) -> Loader:
        """Over a link of which nothing is remembered: it exists only here."""
        settings = LoadSettings(repair=repair)
        return Loader(
            self._engine, self._corpus, costs=self._costs, link=link, memory=EstimatesFile(None), settings=settings
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the timed prompt, its question included."""
        first = self._prompts[0]
        texts = sum(map(len, self._texts(first)))
        return len(first.head or self._engine.opening_tokens) + texts + len(first.question)

    def text(self) -> float:
        """Seconds to the first token by prefill of the whole prompt, already tokenised."""
        first = self._prompts[0]
        return text_ttft(self._engine, self._texts(first), first.question, first.head)

    def _texts(self, prompt: Prompt) -> list[Sequence[int]]:
        return [self._tokens[document] for document in prompt.documents]

    def answers(self, link: LinkSettings) -> list[dict[str, str]]:
        """Answers of a full prefill and of kvwire, for chat prompts."""
        rows = []
        with self._loader(link, ANSWER_REPAIR) as loader:
            for prompt in (each for each in self._prompts if each.asked):
                answer = prompt.ask(loader, tokens=_SAID_TOKENS)
                full, short = self._full_answer(prompt), self._in_words(prompt, answer.tokens)
                rows.append({"question": prompt.asked.strip(), "right": prompt.right, "full": full, "kvwire": short})
        return rows

    def _full_answer(self, prompt: Prompt) -> str:
        """The model's answer after a prefill of the whole prompt."""
        ids = [*prompt.head, *(token for text in self._texts(prompt) for token in text)]
        (cache,) = self._engine.prefill([ids])
        past = self._engine.past_key_values(cache)
        first = int(self._engine.forward(past, prompt.question, cache.tokens, logits=1)[-1].argmax())
        start = cache.tokens + len(prompt.question)
        return self._in_words(prompt, self._engine.generate(past, first, start, _SAID_TOKENS))

    def _in_words(self, prompt: Prompt, ids: Sequence[int]) -> str:
        end = next((at for at, token in enumerate(ids) if token in prompt.stop), len(ids))
        return " ".join(self._engine.detokenize(list(ids[:end]), special=False).split())

    def over(self, name: str, link: LinkSettings, deadline: float) -> dict[str, Any]:
        """Measure all three ways over one link."""
        with self._loader(link, "none") as loader:
            row = self._over(loader, name, link, deadline)
        with self._loader(link, REPAIR) as loader:
            row["repaired"] = self._repaired(loader)
        return row

    def _repaired(self, loader: Loader) -> dict[str, float]:
        """Repair some rows of the same prompts: the first one's time, and how far all are from a full prefill."""
        first, *others = self._prompts
        first.ask(loader)
        answers = [first.ask(loader) for _ in range(_REPEATS)]
        answers += [prompt.ask(loader) for prompt in others]
        return {
            "share": REPAIR,
            "ttft_s": statistics.median(answer.timing.ttft_s for answer in answers[:_REPEATS]),
            "repair_s": statistics.median(answer.timing.repair_s for answer in answers[:_REPEATS]),
            "kl_from_full": self._from_full(answers[_REPEATS - 1 :]),
        }

    def _from_full(self, answers: Sequence[Answer]) -> float:
        pairs = zip(self._references, answers, strict=True)
        return statistics.fmean(reference.from_full(self._engine, answer.prompt.cache) for reference, answer in pairs)

    def _over(self, loader: Loader, name: str, link: LinkSettings, deadline: float) -> dict[str, Any]:
        first = self._prompts[0]
        ask = partial(Prompt.ask, loader=loader, deadline_s=deadline, objective="earliest")
        raw = partial(
            self._raw.ttft, self._engine, self._corpus.catalog.store, link, first.documents, first.question, first.head
        )
        ask(first)  # a server in use knows its link, so the first load is not timed
        raw_s, raw_bytes = raw()
        again = raw_s * _REPEATS < _RAW_BUDGET_S  # then the first load is a warm-up
        times: dict[str, list[float]] = {"text": [], "raw": [] if again else [raw_s], "kvwire": []}
        answers = []
        for _ in range(_REPEATS):
            times["text"].append(self.text())
            answers.append(ask(first))
            if again:
                times["raw"].append(raw()[0])
        times["kvwire"] = [answer.timing.ttft_s for answer in answers]
        answer = sorted(answers, key=lambda answer: answer.timing.ttft_s)[_REPEATS // 2]
        others = list(map(ask, self._prompts[1:]))
        compared = zip(self._references, [answer, *others], strict=True)
        kls, agreements = zip(*(r.compare(self._engine, a.prompt.cache) for r, a in compared), strict=True)
        text_bytes = 4 * sum(map(len, self._texts(first)))
        return {
            "name": name,
            "mbit_s": link.bandwidth_bytes_s * 8 / 1e6,
            "rtt_s": link.rtt_s,
            "ttft_s": {way: statistics.median(seconds) for way, seconds in times.items()},
            "ttft_all_s": times,
            "bytes": {"text": text_bytes, "raw": raw_bytes, "kvwire": answer.bytes},
            "decisions": _decisions(answer, first.documents),
            "timing": {name: getattr(answer.timing, name) for name in _TIMED},
            "kl": statistics.fmean(kls),
            "greedy_agreement": statistics.fmean(agreements),
            "kl_of_each_prompt": list(kls),
            "kl_from_full": self._from_full([answer, *others]),
            "missed_deadline": answer.timing.ttft_s > deadline,
        }


def _decisions(answer: Answer, documents: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"document": documents[d.chunk.document], "chunk": d.chunk.chunk, "action": d.action, "level": d.level}
        for d in answer.decisions
    ]


def _named_link(text: str) -> tuple[str, LinkSettings]:
    name, equals, link = text.partition("=")
    return (name, parse_link(link)) if equals else (text, parse_link(text))


def _fitting(engine: Engine, texts: Mapping[str, str], say: Callable[[str], None]) -> dict[str, list[int]]:
    """Token ids of the documents that can be encoded; others are reported and left out."""
    tokens = {name: token_ids(engine.tokenize, engine.window, text) for name, text in texts.items()}
    problems = {name: problem_with(ids, engine.window) for name, ids in tokens.items()}
    for name, problem in problems.items():
        if problem:
            say(f"left out: {name}: {problem}")
    fitting = {name: ids for name, ids in tokens.items() if not problems[name]}
    if not fitting:
        raise ArgumentError("none of the documents can be encoded")
    return fitting


def _prompts(engine: Engine, tokens: Mapping[str, Sequence[int]], questions: str | None) -> list[Prompt]:
    """Questions from a file, or one over as many documents as fit the window."""
    if questions is None:
        ids = tuple(engine.tokenize(_QUESTION, place="last"))
        chosen, room = [], engine.window - len(engine.opening_tokens) - len(ids) - _ANSWER_TOKENS
        for name in sorted(tokens, key=lambda name: -len(tokens[name])):
            if len(tokens[name]) <= room:
                chosen.append(name)
                room -= len(tokens[name])
        return [Prompt(tuple(chosen), ids)]
    try:
        rows = strict_json(Path(questions).read_bytes())
        prompts = [_prompt(engine, row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{questions} is not a list of documents and questions ({error})") from error
    missing = sorted({name for prompt in prompts for name in prompt.documents} - set(tokens))
    if missing or not prompts:
        msg = f"{questions} asks about documents that are not there: {', '.join(missing) or 'no questions at all'}"
        raise ArgumentError(msg)
    return prompts


def _prompt(engine: Engine, row: Mapping[str, Any]) -> Prompt:
    """A question in the model's chat template if it has an answer, else text to continue."""
    documents, question = tuple(row["documents"]), row["question"]
    if "answer" in row:
        with suppress(NotFoundError):  # no template
            asked = f"\nQuestion: {question}"
            chat = engine.render_chat(Chat(system=SYSTEM), asked)
            return Prompt(documents, chat.tail, asked, str(row["answer"]), chat.head, chat.stop)
    return Prompt(documents, tuple(engine.tokenize(question, place="last")))


def _encode(
    engine: Engine,
    store: Store,
    tokens: Mapping[str, Sequence[int]],
    more: Mapping[str, Sequence[int]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    started = time.perf_counter()
    corpus = Corpus(engine, store, coding=Coding(calibration="quick" if more else "full"))
    if more:
        corpus.calibrate([Document(name, tuple(ids)) for name, ids in (*tokens.items(), *more.items())])
        say(f"fitted a profile in {time.perf_counter() - started:.1f} s, once for the model")
        started = time.perf_counter()
    done = list(corpus.encode([Document(name, tuple(ids)) for name, ids in tokens.items()]))
    seconds = time.perf_counter() - started
    elements = sum(e.info.tokens * e.info.meta.elements_per_token for e in done)
    levels = done[0].info.levels
    sizes = {level.name: sum(e.info.levels[i].cumulative_bytes for e in done) for i, level in enumerate(levels)}
    bits = {name: 8 * size / elements for name, size in sizes.items()}
    say(f"encoded {len(done)} documents, {sum(e.info.tokens for e in done)} tokens in {seconds:.1f} s; bits/element:")
    profile = corpus.profile()
    profile_bytes = len(profile.data) if profile else 0
    say("  " + ", ".join(f"{name} {value:.2f}" for name, value in bits.items()) + " (bf16: 16)")
    say(f"  and a profile of {profile_bytes / 1e6:.1f} MB, once for the model: readers keep it, as they keep the model")
    return {
        "documents": len(done), "seconds": seconds, "bits_per_element": bits, "bytes": sizes,
        "profile_bytes": profile_bytes,
    }  # fmt: skip


@contextmanager
def local_server(folder: Path | str) -> Iterator[str]:
    """Run ``kvwire serve`` on a free port of loopback; yields its URL."""
    options = ["--store", Path(folder).resolve().as_uri(), "--port", "0", "--json", "--log-level", "warning"]
    command = [sys.executable, "-P", "-m", "kvwire", "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - this very program
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise StorageError("the server did not start; see its message above")
            direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
            os.environ["no_proxy"] = ",".join(filter(None, (direct, "127.0.0.1")))  # proxies cannot reach it
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            process.wait(10)


def _draw(report: Mapping[str, Any], path: Path, say: Callable[[str], None]) -> None:
    try:
        from kvwire.comparison.pictures import draw_demo
    except ImportError:
        say("no picture: install matplotlib (pip install 'kvwire[demo]')")
        return
    draw_demo(report, path)
    say(f"\nwritten: {path.with_suffix('.json')} and {path}")
