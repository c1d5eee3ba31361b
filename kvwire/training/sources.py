"""Training data: files of questions with passages, conversations, summaries, and plain text; mixed by weights."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvwire._json import strict_json
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime.text_files import decoded_text, read_part
from kvwire.training.samples import Ids, Sample, Turn, chance, check_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvwire.engines.texts import Trust
    from kvwire.reuse import LinkLayout

_TEXTS = (".txt", ".md")
_LINES = (".jsonl", ".ndjson")
_FIELDS = {"passages", "question", "answer", "turns", "messages", "summary", "text", "system", "ordered"}
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class TextCut:
    """How to cut prompts from plain text: consecutive pieces as documents, then a continuation.

    Attributes:
        documents: Least and most documents; 0 is plain language modelling.
        tokens: Of each document.
        rest: Tokens of the continuation.
        given: How many of these are the question; the others are learnt.
    """

    documents: tuple[int, int]
    tokens: int
    rest: int
    given: int = 1

    def __post_init__(self) -> None:
        """Refuse cuts without an answer."""
        if not 0 < self.given < self.rest:
            msg = f"of {self.rest} tokens behind documents, 1 to {self.rest - 1} can be given, not {self.given}"
            raise ArgumentError(msg)

    def most(self) -> int:
        """Tokens of the largest prompt."""
        return self.documents[1] * self.tokens + self.rest


class Samples:
    """Samples of one file of lines."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Keep the samples.

        Args:
            samples: At least one.
        """
        self.samples = tuple(samples)

    @property
    def digest(self) -> str:
        """Identifies the samples."""
        told = repr([(each.passages, each.turns, each.system) for each in self.samples])
        return hashlib.sha256(told.encode()).hexdigest()

    def fitting(self, layout: LinkLayout, most: int, vocabulary: int, *, skip_long: bool = False) -> Samples:
        """Check that samples can be used.

        Args:
            layout: How their documents are linked.
            most: Longest sequence, in tokens.
            vocabulary: Upper bound of token ids.
            skip_long: Leave out samples that are too long.

        Returns:
            The usable samples.

        Raises:
            ArgumentError: A sample is not, or none is.
        """
        fitting = []
        for sample in self.samples:
            with suppress(ArgumentError) if skip_long else nullcontext():
                check_fit(sample, layout, most, vocabulary)
                fitting.append(sample)
        if not fitting:
            raise ArgumentError(f"no sample fits {most} tokens; raise --most-tokens, or give shorter ones")
        return Samples(fitting)

    def draw(self, turn: int, seed: str) -> Sample:
        """Draw a sample: each once per epoch, with its passages shuffled.

        Args:
            turn: Number of earlier draws.
            seed: Of order and shuffling.

        Returns:
            The sample.
        """
        epoch, at = divmod(turn, len(self.samples))
        order = chance(f"{seed} epoch {epoch}").sample(range(len(self.samples)), len(self.samples))
        return self.samples[order[at]].shuffled(chance(f"{seed} turn {turn}"))


class Text:
    """Plain text, cut at random for every sample."""

    def __init__(self, ids: Ids, cut: TextCut, place: str) -> None:
        """Keep the text.

        Args:
            ids: Token ids of the whole text.
            cut: How to cut prompts from it.
            place: Name of the file.

        Raises:
            ArgumentError: It is shorter than the largest prompt.
        """
        if len(ids) < cut.most():
            msg = f"{place} has {len(ids)} tokens and a prompt takes {cut.most()}: cut smaller, or join texts"
            raise ArgumentError(msg)
        self._ids, self._cut, self._place = ids, cut, place

    @property
    def digest(self) -> str:
        """Identifies the text and the cut."""
        return hashlib.sha256(repr((self._ids, self._cut)).encode()).hexdigest()

    def fitting(self, layout: LinkLayout, most: int, vocabulary: int, *, skip_long: bool = False) -> Text:
        """Check that the largest prompt of this text can be used.

        Args:
            layout: How its documents are linked.
            most: Longest sequence, in tokens.
            vocabulary: Upper bound of token ids.
            skip_long: Ignored: every prompt of a text has the same size.

        Returns:
            The text.

        Raises:
            ArgumentError: The prompt is too long.
        """
        del skip_long
        documents = self._cut.documents[1]
        largest = (self._ids[: self._cut.tokens],) * documents
        turn = Turn(self._ids[: self._cut.given], self._ids[self._cut.given : self._cut.rest])
        check_fit(Sample(largest, (turn,), place=self._place), layout, most, vocabulary)
        return self

    def draw(self, turn: int, seed: str) -> Sample:
        """Draw a sample.

        Args:
            turn: Number of earlier draws.
            seed: Of the cuts.

        Returns:
            Consecutive documents of the text, and the continuation.
        """
        drawn = chance(f"{seed} turn {turn}")
        count = drawn.randint(*self._cut.documents)
        position = drawn.randrange(len(self._ids) - count * self._cut.tokens - self._cut.rest + 1)
        start = position + count * self._cut.tokens
        size = self._cut.tokens
        passages = tuple(self._ids[first : first + size] for first in range(position, start, size))
        rest = self._ids[start : start + self._cut.rest]
        question = self._cut.given
        return Sample(passages, (Turn(rest[:question], rest[question:]),), place=f"{self._place}, token {position}")


class Mixture:
    """Files of samples, drawn by weights; a few counts are its whole state."""

    def __init__(self, parts: Mapping[str, Samples | Text], weights: Mapping[str, float], seed: int) -> None:
        """Combine sources.

        Args:
            parts: The sources by name.
            weights: Relative frequency of each.
            seed: Seed of all draws.

        Raises:
            ArgumentError: There is nothing to draw, or a weight is not positive.
        """
        if not parts or any(not weights[name] > 0 for name in parts):
            raise ArgumentError("training data needs at least one file, and weights above 0")
        self._parts, self._seed = dict(parts), seed
        self._weights = [weights[name] for name in self._parts]
        self.counts = dict.fromkeys(self._parts, 0)
        """Number of draws from each part; with the seed, they determine the next draws."""

    @property
    def digest(self) -> str:
        """Identifies data, weights and seed."""
        parts = [(name, part.digest) for name, part in self._parts.items()]
        return hashlib.sha256(repr((parts, self._weights, self._seed)).encode()).hexdigest()

    def draw(self) -> Sample:
        """Draw the next sample."""
        total = sum(self.counts.values())
        (name,) = chance(f"{self._seed} part {total}").choices(list(self._parts), self._weights)
        sample = self._parts[name].draw(self.counts[name], f"{self._seed} {name}")
        self.counts[name] += 1
        return sample


def read_source(path: Path, tokenize: Callable[..., Sequence[int]], cut: TextCut) -> Samples | Text:
    """Read training data from a file, or a folder of text files.

    Args:
        path: ``.jsonl``: an object per line, see ``sample_of``. ``.txt``, ``.md``, or a folder of such: plain text.
        tokenize: Tokenises a text.
        cut: How plain text becomes prompts.

    Returns:
        A source of samples.

    Raises:
        NotFoundError: It does not exist, or holds nothing to train on.
        ArgumentError: A line is invalid, or a text is too short.
        StorageError: It cannot be read.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXTS and file.is_file())
        if not files:
            raise NotFoundError(f"{path} holds no .txt or .md files")
        return Text(_joined(files, tokenize), cut, str(path))
    if not path.is_file():
        raise NotFoundError(f"{path} is neither a file nor a folder")
    if path.suffix in _TEXTS:
        return Text(_joined([path], tokenize), cut, str(path))
    if path.suffix not in _LINES:
        raise ArgumentError(f"{path} is no .jsonl, .txt or .md file: training data are such files, or folders of text")
    return Samples(list(_samples(path, tokenize)))


def _joined(files: Iterable[Path], tokenize: Callable[..., Sequence[int]]) -> Ids:
    return tuple(token for file in files for token in tokenize(decoded_text(read_part(str(file)), str(file))))


def _samples(path: Path, tokenize: Callable[..., Sequence[int]]) -> Iterator[Sample]:
    lines = [(n, line) for n, line in enumerate(read_part(str(path)).splitlines(), 1) if line.strip()]
    if not lines:
        raise NotFoundError(f"{path} holds no samples: an object a line, such as {{passages, question, answer}}")
    for number, line in lines:
        place = f"{path}, line {number}"
        yield sample_of(strict_json(line, place), tokenize, place)


def sample_of(fields: Any, tokenize: Callable[..., Sequence[int]], place: str) -> Sample:  # noqa: ANN401 - JSON
    """Parse one line. Texts may be lists of token ids instead.

    - ``{passages, question, answer}``: the passages are documents; ``{passages, turns: [{question, answer}, ...]}``
    - ``{passages, summary}``, optionally with ``question``
    - ``{messages: [{role, content}, ...]}``: a conversation, optionally with ``passages``
    - ``{text}``: plain text, all of it learnt

    Each may have ``system``, the text before the documents; ``ordered: true`` keeps the passages in their order.
    """
    if not isinstance(fields, dict) or not _FIELDS & fields.keys():
        msg = f"{place}: a sample is an object of passages, question and answer, or of turns, messages, summary or text"
        raise ArgumentError(msg)

    def read(value: Any, name: str) -> Ids:  # noqa: ANN401 - JSON
        trust: Trust = "document" if name == "a passage" else "frame"
        return _ids(value, partial(tokenize, trust=trust), f"{place}: {name}")

    named = fields.get("passages", [])
    if not isinstance(named, list):
        raise ArgumentError(f"{place}: passages must be a list of texts")
    passages = tuple(read(passage, "a passage") for passage in named)
    system = read(fields["system"], "system") if "system" in fields else ()
    system_turn, turns = _turns(fields, read, place)
    turns = _with_first_token(turns)
    if not any(turn.answer for turn in turns):
        msg = f"{place}: no answer to learn: training data needs answer, turns, messages, summary or text"
        raise ArgumentError(msg)
    if not all(passages):
        raise ArgumentError(f"{place}: a passage is empty; leave it out")
    if not isinstance(fields.get("ordered", False), bool):
        raise ArgumentError(f"{place}: ordered is true or false")
    return Sample(passages, turns, system + system_turn, place, fields.get("ordered", False))


def _turns(fields: dict[str, Any], read: Callable[[Any, str], Ids], place: str) -> tuple[Ids, tuple[Turn, ...]]:
    """The system text of a conversation, and the turns."""
    kinds = [kind for kind in ("answer", "turns", "messages", "summary", "text") if kind in fields]
    if len(kinds) > 1:
        raise ArgumentError(f"{place}: a sample has one of {', '.join(kinds)}, not several")
    question = read(fields["question"], "question") if "question" in fields else ()
    match kinds:
        case ["turns"]:
            return (), tuple(
                Turn(read(turn.get("question", ""), "a question"), read(turn.get("answer", ""), "an answer"))
                for turn in _objects(fields["turns"], place)
            )
        case ["messages"]:
            return _conversation(_objects(fields["messages"], place), read, place)
        case [kind]:
            return (), (Turn(question, read(fields[kind], kind)),)
    return (), ()


def _conversation(
    messages: Sequence[dict[str, Any]], read: Callable[[Any, str], Ids], place: str
) -> tuple[Ids, tuple[Turn, ...]]:
    system: Ids = ()
    question: Ids = ()
    turns: list[Turn] = []
    for message in messages:
        role, text = message.get("role"), read(message.get("content", ""), "a message")
        if role not in _ROLES or (role == "system" and (question or turns)):
            raise ArgumentError(f"{place}: messages are of the system, first, then of user and assistant")
        if role == "system":
            system += text
        elif role == "user":
            question += text
        else:
            turns.append(Turn(question, text))
            question = ()
    return system, tuple(turns)


def _with_first_token(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Without a question, give the answer's first token: a document's last row sees no other document."""
    if not turns or turns[0].question:
        return turns
    return (Turn(turns[0].answer[:1], turns[0].answer[1:]), *turns[1:])


def _objects(value: Any, place: str) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ArgumentError(f"{place}: turns and messages are lists of objects")
    return value


def _ids(value: Any, tokenize: Callable[..., Sequence[int]], what: str) -> Ids:  # noqa: ANN401 - JSON
    if isinstance(value, str):
        return tuple(tokenize(value)) if value else ()
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise ArgumentError(f"{what} must be a text, or a list of token ids")
