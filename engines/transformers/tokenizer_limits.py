"""Checks untrusted tokenizers before opening: oversized files, and rules that multiply characters, are refused."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvwire.errors import CorruptError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MOST_BYTES = 128 << 20
"""Several times the largest known tokenizer, of a quarter of a million tokens."""
_MOST_GROWTH = 64
"""Characters that rules may make of one; Unicode's own normal forms make 18 at most."""
_GROWS = (b'"Replace"', b'"Precompiled"')
"""Files with neither are not parsed: that takes as long as opening them."""
_MAY_BE_EMPTY = re.compile(r"\(\?[=!<]|\\[bBAzZG]|[\^$*?|]|\{0|\(\)")
"""Part of regular expressions that may match between two characters."""
_PANIC = "PanicException"
_PARTS = ("normalizers", "decoders")


def check_tokenizer(paths: Iterable[Path]) -> None:
    """Refuse a tokenizer that could use unlimited memory."""
    for path in paths:
        try:
            size = path.stat().st_size
            data = path.read_bytes() if path.name == "tokenizer.json" and size <= _MOST_BYTES else b""
        except OSError as error:
            msg = f"{path} cannot be read ({error.strerror}); check its permissions and the disk"
            raise StorageError(msg) from error
        if size > _MOST_BYTES:
            raise CorruptError(f"{path} has {size} bytes, more than any tokenizer; copy the model's files again")
        if any(name in data for name in _GROWS):
            _check_rules(path, data)


def _check_rules(path: Path, data: bytes) -> None:
    try:
        whole = json.loads(data)
        grown = max(growth(whole.get(part)) for part in ("normalizer", "decoder"))
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); copy its files again, or remove them to use token ids only"
        raise CorruptError(msg) from error
    if grown > _MOST_GROWTH:
        raise CorruptError(
            f"{path} has rules that make up to {grown:.3g} characters of one, which no tokenizer needs; "
            "copy its files again, or remove them to use token ids only"
        )


@contextmanager
def no_panics() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no ``Exception``, into an error."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC and type(error) is not Exception:  # the library raises bare Exception
            raise
        msg = "the tokenizer's rules fail on this text; copy its files again, or use another model"
        raise CorruptError(msg) from None  # a panic may quote the text


def growth(rules: Any) -> float:  # noqa: ANN401 - JSON
    """Most characters that rules may make of one."""
    if rules is None:
        return 1.0
    kind = rules.get("type")
    if kind == "Sequence":
        return math.prod(growth(rule) for part in _PARTS for rule in rules.get(part) or ())
    if kind == "Replace":
        return _replaced(rules["pattern"], str(rules["content"])) if rules.keys() >= {"pattern", "content"} else 1.0
    return _longest(rules.get("precompiled_charsmap")) if kind == "Precompiled" else 1.0


def _replaced(pattern: dict[str, str], content: str) -> float:
    if literal := pattern.get("String"):
        return max(1.0, len(content) / len(literal))
    may_be_empty = not pattern.get("Regex") or _MAY_BE_EMPTY.search(pattern["Regex"])
    return max(1.0, len(content) + (1.0 if may_be_empty else 0.0))


def _longest(charsmap: str | None) -> float:
    """Longest text in SentencePiece's character map: the length of a trie, the trie, zero-terminated texts."""
    try:
        data = base64.b64decode(charsmap or "", validate=True)
    except binascii.Error as error:
        raise ValueError("the map of characters is not base64") from error
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1.0, *(len(text.decode(errors="replace")) for text in texts))
