"""Training data: files of questions with passages, of conversations, of summaries, and plain text; mixed by weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvwire._json import strict_json
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime.text_files import decoded_text, read_part
from kvwire.training.samples import Ids, Sample, Turn, chance
from kvwire.training.sequences import check_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvwire.engines.base import Trust
    from kvwire.reuse import LinkLayout

_TEXTS = (".txt", ".md")
_LINES = (".jsonl", ".ndjson")
_FIELDS = {"passages", "question", "answer", "turns", "messages", "summary", "text", "system", "ordered"}
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class TextCut:
    """How plain text becomes prompts: neighbouring pieces as documents, in order, and what follows them.

    Attributes:
        documents: Least and most documents; 0 is plain language modelling.
        tokens: Of each document.
        rest: Tokens that follow.
        given: How many of these stand as the question does; the others are learnt.
    """

    documents: tuple[int, int]
    tokens: int
    rest: int
    given: int = 1

    def __post_init__(self) -> None:
        """Refuse cuts that leave nothing to learn."""
        if not 0 < self.given < self.rest:
            msg = f"of {self.rest} tokens behind documents, 1 to {self.rest - 1} can be given, not {self.given}"
            raise ArgumentError(msg)

    def most(self) -> int:
        """Tokens of the largest prompt."""
        return self.documents[1] * self.tokens + self.rest


class Samples:
    """Samples of one file of lines, each as it was read."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Keep them.

        Args:
            samples: At least one.
        """
        self.samples = tuple(samples)

    @property
    def digest(self) -> str:
        """Tells files of samples apart."""
        return hashlib.sha256(
            repr([(each.passages, each.turns, each.system) for each in self.samples]).encode()
        ).hexdigest()

    def fitting(self, layout: LinkLayout, most: int, vocabulary: int, *, skip_long: bool = False) -> Samples:
        """Check that samples can be trained on.

        Args:
            layout: How their documents are linked.
            most: Longest sequence, in tokens.
            vocabulary: Token ids lie below this.
            skip_long: Leaves out what does not fit.

        Returns:
            The samples that do.

        Raises:
            ArgumentError: A sample does not, or none does.
        """
        fitting = []
        for sample in self.samples:
            try:
                check_fit(sample, layout, most, vocabulary)
            except ArgumentError:
                if not skip_long:
                    raise
            else:
                fitting.append(sample)
        if not fitting:
            msg = f"no sample fits {most} tokens; raise --most-tokens, or give shorter ones"
            raise ArgumentError(msg)
        return Samples(fitting)

    def draw(self, turn: int, seed: str) -> Sample:
        """The sample of a turn: each once in every round through the file, its passages shuffled.

        Args:
            turn: How many this file gave before.
            seed: Of order and shuffling.

        Returns:
            The sample.
        """
        epoch, at = divmod(turn, len(self.samples))
        order = chance(f"{seed} epoch {epoch}").sample(range(len(self.samples)), len(self.samples))
        return self.samples[order[at]].shuffled(chance(f"{seed} turn {turn}"))


class Text:
    """Plain text, cut anew for every sample."""

    def __init__(self, ids: Ids, cut: TextCut, place: str) -> None:
        """Keep it.

        Args:
            ids: Token ids of the whole text.
            cut: How it becomes prompts.
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
        """Tells texts, and how they are cut, apart."""
        return hashlib.sha256(repr((self._ids, self._cut)).encode()).hexdigest()

    def fitting(self, layout: LinkLayout, most: int, vocabulary: int, *, skip_long: bool = False) -> Text:
        """Check that the largest prompt of this text can be trained on.

        Args:
            layout: How its documents are linked.
            most: Longest sequence, in tokens.
            vocabulary: Token ids lie below this.
            skip_long: Changes nothing: every prompt of a text is of the same size.

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
        """A sample.

        Args:
            turn: How many this text gave before.
            seed: Of the cuts.

        Returns:
            Neighbouring documents in the text's order, and what follows.
        """
        drawn = chance(f"{seed} turn {turn}")
        count = drawn.randint(*self._cut.documents)
        at = drawn.randrange(len(self._ids) - count * self._cut.tokens - self._cut.rest + 1)
        start = at + count * self._cut.tokens
        passages = tuple(self._ids[first : first + self._cut.tokens] for first in range(at, start, self._cut.tokens))
        rest = self._ids[start : start + self._cut.rest]
        given = self._cut.given
        return Sample(passages, (Turn(rest[:given], rest[given:]),), place=f"{self._place}, token {at}")


class Mixture:
    """Files of samples, drawn by weights; where it stands is a few counts."""

    def __init__(self, parts: Mapping[str, Samples | Text], weights: Mapping[str, float], seed: int) -> None:
        """Mix.

        Args:
            parts: What samples come from, by name.
            weights: How often each is drawn, relative to the others.
            seed: Of everything drawn.

        Raises:
            ArgumentError: There is nothing to draw, or a weight is not positive.
        """
        if not parts or any(not weights[name] > 0 for name in parts):
            msg = "training data needs at least one file, and weights above 0"
            raise ArgumentError(msg)
        self._parts, self._seed = dict(parts), seed
        self._weights = [weights[name] for name in self._parts]
        self.counts = dict.fromkeys(self._parts, 0)
        """How many samples each part has given; with the seed, all that decides what comes next."""

    @property
    def digest(self) -> str:
        """Tells mixtures apart: data, weights and seed."""
        parts = [(name, part.digest) for name, part in self._parts.items()]
        return hashlib.sha256(repr((parts, self._weights, self._seed)).encode()).hexdigest()

    def draw(self) -> Sample:
        """The next sample."""
        total = sum(self.counts.values())
        (name,) = chance(f"{self._seed} part {total}").choices(list(self._parts), self._weights)
        sample = self._parts[name].draw(self.counts[name], f"{self._seed} {name}")
        self.counts[name] += 1
        return sample


def read_source(path: Path, tokenize: Callable[..., Sequence[int]], cut: TextCut) -> Samples | Text:
    """Read a file, or a folder of text files.

    Args:
        path: ``.jsonl``: an object a line, see ``sample_of``. ``.txt``, ``.md``, or a folder of such: plain text.
        tokenize: Reads a text.
        cut: How plain text becomes prompts.

    Returns:
        What samples are drawn from.

    Raises:
        NotFoundError: It is not there, or holds nothing to train on.
        ArgumentError: A line is no sample, or a text is too short.
        StorageError: It cannot be read.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXTS and file.is_file())
        if not files:
            msg = f"{path} holds no .txt or .md files"
            raise NotFoundError(msg)
        return Text(_joined(files, tokenize), cut, str(path))
    if not path.is_file():
        msg = f"{path} is neither a file nor a folder"
        raise NotFoundError(msg)
    if path.suffix in _TEXTS:
        return Text(_joined([path], tokenize), cut, str(path))
    if path.suffix not in _LINES:
        msg = f"{path} is no .jsonl, .txt or .md file: training data are such files, or folders of text"
        raise ArgumentError(msg)
    return Samples(list(_samples(path, tokenize)))


def _joined(files: Iterable[Path], tokenize: Callable[..., Sequence[int]]) -> Ids:
    return tuple(token for file in files for token in tokenize(decoded_text(read_part(str(file)), str(file))))


def _samples(path: Path, tokenize: Callable[..., Sequence[int]]) -> Iterator[Sample]:
    found = False
    for number, line in enumerate(read_part(str(path)).splitlines(), 1):
        if line.strip():
            place = f"{path}, line {number}"
            found = True
            try:
                yield sample_of(strict_json(line), tokenize, place)
            except ArgumentError as error:
                if str(error).startswith(place):
                    raise
                msg = f"{place}: {error}"
                raise ArgumentError(msg) from error
    if not found:
        msg = f"{path} holds no samples: an object a line, such as {{passages, question, answer}}"
        raise NotFoundError(msg)


def sample_of(fields: Any, tokenize: Callable[..., Sequence[int]], place: str) -> Sample:  # noqa: ANN401 - JSON
    """Read one line. Texts may be lists of token ids instead.

    - ``{passages, question, answer}``: the passages are documents; ``{passages, turns: [{question, answer}, ...]}``
    - ``{passages, summary}``, with ``question`` where one is to be asked before
    - ``{messages: [{role, content}, ...]}``: a conversation, with ``passages`` where there are some
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
        msg = f"{place}: passages must be a list of texts"
        raise ArgumentError(msg)
    passages = tuple(read(passage, "a passage") for passage in named)
    system = read(fields["system"], "system") if "system" in fields else ()
    said, turns = _turns(fields, read, place)
    turns = _with_first_token(turns)
    if not any(turn.answer for turn in turns):
        msg = f"{place}: no answer to learn: training data needs answer, turns, messages, summary or text"
        raise ArgumentError(msg)
    if not all(passages):
        msg = f"{place}: a passage is empty; leave it out"
        raise ArgumentError(msg)
    if not isinstance(fields.get("ordered", False), bool):
        msg = f"{place}: ordered is true or false"
        raise ArgumentError(msg)
    return Sample(passages, turns, system + said, place, fields.get("ordered", False))


def _turns(fields: dict[str, Any], read: Callable[[Any, str], Ids], place: str) -> tuple[Ids, tuple[Turn, ...]]:
    """What the system says in a conversation, and the turns."""
    kinds = [kind for kind in ("answer", "turns", "messages", "summary", "text") if kind in fields]
    if len(kinds) > 1:
        msg = f"{place}: a sample has one of {', '.join(kinds)}, not several"
        raise ArgumentError(msg)
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
    said: Ids = ()
    asked: Ids = ()
    turns: list[Turn] = []
    for message in messages:
        role, text = message.get("role"), read(message.get("content", ""), "a message")
        if role not in _ROLES or (role == "system" and (asked or turns)):
            msg = f"{place}: messages are of the system, first, then of user and assistant"
            raise ArgumentError(msg)
        if role == "system":
            said += text
        elif role == "user":
            asked += text
        else:
            turns.append(Turn(asked, text))
            asked = ()
    return said, tuple(turns)


def _with_first_token(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """With no question, the first token of the answer is given: a document's last row sees no other document."""
    if not turns or turns[0].question:
        return turns
    return (Turn(turns[0].answer[:1], turns[0].answer[1:]), *turns[1:])


def _objects(value: Any, place: str) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        msg = f"{place}: turns and messages are lists of objects"
        raise ArgumentError(msg)
    return value


def _ids(value: Any, tokenize: Callable[..., Sequence[int]], what: str) -> Ids:  # noqa: ANN401 - JSON
    if isinstance(value, str):
        return tuple(tokenize(value)) if value else ()
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    msg = f"{what} must be a text, or a list of token ids"
    raise ArgumentError(msg)
