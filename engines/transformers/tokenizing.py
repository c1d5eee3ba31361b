"""The tokeniser for all of kvwire: a text is a piece of a prompt, so its place and author matter.

Tokenizers expect whole texts. SentencePiece puts a space before them, some strip spaces at both ends, and control
tokens spelt in a text (``<|im_end|>``) become control tokens. Pieces are read without these habits, and only the
caller's own frame yields control tokens, never a document.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from kvwire.engines.transformers.tokenizer_limits import no_panics
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from kvwire.engines.texts import Place, Trust

_BOM = "\ufeff"
_MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)
"""Pattern of control tokens that a tokenizer adds without marking them: ``<think>``, ``[INST]``."""
_BARRED = re.compile(r"<\|.+\|>", re.DOTALL)
"""Pattern that only control tokens match."""
_RULES = ("normalizer", "pre_tokenizer")
_READS = (*_RULES, "model", "added_tokens")
"""Parts of a tokenizer's JSON that turn text into tokens; templates, truncation and decoders do not."""
_PROBE = "a"


@dataclass(frozen=True)
class _Facts:
    """Facts read from a tokenizer.

    Attributes:
        digest: Digest of all that turns text into tokens.
        control: Spellings of control tokens by id.
        unknown: Id for text outside the vocabulary.
        rules: Its rules, as JSON.
    """

    digest: str
    control: dict[int, str]
    unknown: int | None
    rules: dict[str, Any]


class PieceTokenizer:
    """Tokenises pieces of prompts with a tokenizer of transformers. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Keep the tokenizer; it is not changed."""
        self.tokenizer = tokenizer
        self._variants: dict[tuple[bool, bool], Tokenizer | None] = {}

    def __call__(self, text: str, place: Place = "middle", trust: Trust = "document") -> list[int]:
        """Tokenise a piece of a prompt."""
        if place not in {"first", "middle", "last"} or trust not in {"document", "frame"}:
            msg = f"place is first, middle or last, and trust document or frame; got {place!r} and {trust!r}"
            raise ArgumentError(msg)
        text = text.removeprefix(_BOM)
        check_unicode(text)
        with no_panics():
            if trust == "frame":
                return self._read(text, place)[0]
            return [token for part, at in self._cut(text, place) for token in self._without_control(part, at)]

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before a whole text: BOS, or none."""
        with no_panics():
            whole, bare = (
                list(self.tokenizer(_PROBE, add_special_tokens=special, verbose=False)["input_ids"])
                for special in (True, False)
            )
        count = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
        return tuple(whole[:count])

    @property
    def control(self) -> frozenset[int]:
        """Ids of control tokens."""
        return frozenset(self._facts.control)

    def spells_control(self, text: str) -> bool:
        """Whether a text spells a control token, which in documents is plain text."""
        return self._spelt.search(text) is not None

    @property
    def digest(self) -> str:
        """SHA-256 over all that turns text into tokens: rules, vocabulary, added tokens; templates do not count."""
        return self._facts.digest

    @cached_property
    def _facts(self) -> _Facts:
        parts = self._parts()
        digested = {part: _without_defaults(parts.get(part)) for part in _READS}
        if self._splits:
            digested["splits"] = True
        digest = hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).hexdigest()
        model = parts.get("model")
        vocabulary = model.get("vocab", ()) if isinstance(model, dict) else ()
        vocabulary_words = vocabulary if isinstance(vocabulary, dict) else {entry[0] for entry in vocabulary}
        control = {
            token: entry.content
            for token, entry in self.tokenizer.added_tokens_decoder.items()
            if entry.special
            or _BARRED.fullmatch(entry.content.strip())
            or (_MARKUP.fullmatch(entry.content.strip()) and entry.content not in vocabulary_words)
        }
        word = (model.get("unk_token") if isinstance(model, dict) else None) or self.tokenizer.unk_token
        unknown: Any = self.tokenizer.convert_tokens_to_ids(word) if word else None
        return _Facts(digest, control, unknown, {name: parts[name] for name in _RULES if name in parts})

    def _parts(self) -> dict[str, Any]:
        """The tokenizer's JSON; for one written in Python, its vocabulary and added tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            parts: dict[str, Any] = json.loads(backend.to_str())
            return parts
        added = {token: str(entry) for token, entry in self.tokenizer.added_tokens_decoder.items()}
        return {"model": [type(self.tokenizer).__name__, self.tokenizer.get_vocab()], "added_tokens": added}

    @cached_property
    def _spelt(self) -> re.Pattern[str]:
        """Matches the spelling of any control token."""
        words = sorted((word for word in self._facts.control.values() if len(word) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, words)) or "(?!)")

    def _cut(self, text: str, place: Place) -> Iterator[tuple[str, Place]]:
        """Cut a text so that no part spells a control token; returns parts and their places."""
        start = end = 0
        while match := self._spelt.search(text, end):
            end = match.start() + 1
            yield text[start:end], place if place != "last" and not start else "middle"
            start = end
        yield text[start:], place if place != "first" or not start else "middle"

    def _without_control(self, text: str, place: Place) -> list[int]:
        """Tokenise text; anything still read as a control token is cut in two and read again."""
        ids, spans = self._read(text, place)
        unknown = self._facts.unknown
        control_at = [index for index, token in enumerate(ids) if token in self._facts.control and token != unknown]
        if not control_at:
            return ids
        cuts = [sum(spans[index]) // 2 if spans else 0 for index in control_at]
        if any(not 0 < cut < len(text) for cut in cuts):
            raise ArgumentError(
                f"the text holds {text[:40]!r}, which this tokenizer reads as the control token "
                f"{self._facts.control[ids[control_at[0]]]!r}; take it out of the text"
            )
        edges = [0, *sorted(set(cuts)), len(text)]
        places: list[Place] = ["middle"] * (len(edges) - 1)
        places[0 if place == "first" else -1] = place
        parts = zip(pairwise(edges), places, strict=True)
        return [token for (start, end), at in parts for token in self._without_control(text[start:end], at)]

    def _read(self, text: str, place: Place) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the character span of each if available."""
        key = (place == "first", place == "last")
        if key not in self._variants:
            self._variants[key] = self._variant(*key)
        variant = self._variants[key]
        if variant is not None:
            encoded = variant.encode(text, add_special_tokens=False)
            return encoded.ids, encoded.offsets
        read = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return list(read["input_ids"]), read.encodings[0].offsets if read.encodings else []

    def _variant(self, is_first: bool, is_last: bool) -> Tokenizer | None:  # noqa: FBT001 - a key
        """The tokenizer without its habits at the ends of texts; None if it has none."""
        rules = self._facts.rules
        changed = {name: _as_piece(rule, is_first, is_last) for name, rule in rules.items()}
        if changed == rules:
            return None
        variant = Tokenizer.from_str(json.dumps(self._parts() | changed | {"truncation": None, "padding": None}))
        variant.encode_special_tokens = self._splits
        return variant

    @property
    def _splits(self) -> bool:
        """Whether the tokenizer itself reads control tokens as text."""
        return bool(getattr(self.tokenizer, "split_special_tokens", False))


def _as_piece(rule: Any, is_first: bool, is_last: bool) -> Any:  # noqa: ANN401, FBT001 - JSON
    """Change a rule of tokenizer.json to read a piece like part of a longer text; None if it has no effect."""
    kind = rule.get("type") if isinstance(rule, dict) else None
    if kind == "Sequence":
        parts = next(name for name in ("normalizers", "pretokenizers") if name in rule)
        rules = [_as_piece(each, is_first, is_last) for each in rule[parts]]
        return rule | {parts: [each for each in rules if each is not None]}
    if kind == "Strip":
        return rule | {"strip_left": rule["strip_left"] and is_first, "strip_right": rule["strip_right"] and is_last}
    if is_first:
        return rule
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return rule | {"prepend_scheme": "never"} | ({"add_prefix_space": False} if "add_prefix_space" in rule else {})
    return rule | {"add_prefix_space": False} if kind == "ByteLevel" else rule


def _without_defaults(value: Any) -> Any:  # noqa: ANN401 - JSON
    """JSON without defaults (null, false, empty), which some library versions write and others omit."""
    if isinstance(value, dict):
        fields = {str(name): _without_defaults(each) for name, each in value.items()}
        return {name: each for name, each in fields.items() if each or (each == 0 and each is not False)}
    if isinstance(value, list):
        return [_without_defaults(each) for each in value]
    return value


def check_unicode(text: str) -> None:
    """Refuse unpaired surrogates, which no file holds and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"character {error.start} of the text is half of a surrogate pair, which is not Unicode; "
            "decode the text as UTF-8"
        ) from error
