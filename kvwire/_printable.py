"""Text from strangers, made fit for terminals and logs: what is invisible or steers a terminal becomes an escape."""

from __future__ import annotations

import logging
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    _Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_SPACE = "Zs"  # spaces of other widths are seen; ``str.isprintable`` denies it
_INVISIBLE = frozenset(
    map(
        chr,
        (
            0x034F,  # joins graphemes
            *range(0x115F, 0x1161),  # Hangul fillers, here and below
            *range(0x17B4, 0x17B6),
            *range(0x180B, 0x180E),
            0x180F,
            0x3164,
            *range(0xFE00, 0xFE10),  # variation selectors, here and below
            0xFFA0,
            *range(0xE0100, 0xE01F0),
        ),
    )
)
_OF_TEXT = frozenset("\n\t\u200c\u200d") | frozenset(map(chr, range(0xFE00, 0xFE10)))
"""Line ends, and what Persian, Indic scripts and emoji are written with."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_MARKS = frozenset("\u061c\u200e\u200f")
_BIDI_CLASSES = frozenset(("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"))
_REFUSED = {
    "Cc": "a control character",
    "Cs": "half of a surrogate pair, as of bytes that are no UTF-8",
    "Zl": "a line separator",
    "Zp": "a paragraph separator",
}


def printable(text: str) -> str:
    r"""One line of anybody's text, such as a name or a message.

    Control characters, line ends, surrogates, marks that turn the direction of writing, and characters of no width
    become escapes such as ``\x1b``. Letters of all scripts and spaces of all widths stay. So do not marks apart from
    their letter where Unicode has one character for both: two names would look alike.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text) if _is_usual(text) else _as_spelt(text))


def printable_text(text: str) -> str:
    """``printable`` for running text: line ends, tabs, joiners and variation selectors stay."""
    return "".join(each if each in _OF_TEXT else _shown(each) for each in text)


def name_problem(name: str) -> str:
    """Why a name is not taken for anything new: it would deceive its readers."""
    for each in name:
        what = _REFUSED.get(unicodedata.category(each), "")
        if each in _MARKS or unicodedata.bidirectional(each) in _BIDI_CLASSES:
            what = "a mark that turns the direction of writing"
        if what:
            return f"U+{ord(each):04X}, {what}"
    return ""


class PrintableLines(logging.Formatter):
    """A record as lines that begin where records begin, and do nothing to a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The record's line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:  # noqa: N802 - logging's name
        """A traceback, whose messages may quote anything."""
        return printable_text(super().formatException(ei))


def _is_usual(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text)


def _as_spelt(text: str) -> Iterator[str]:
    """Characters as they are shown, where some could be spelt otherwise and look the same."""
    before = ""  # a letter, and the marks on it
    for each in text:
        if not _is_usual(before + each):
            yield _escape(ord(each))
            continue
        before = before + each if unicodedata.combining(each) else each
        yield _shown(each)


def _shown(character: str) -> str:
    is_seen = character.isprintable() and character not in _INVISIBLE
    if is_seen or unicodedata.category(character) == _SPACE:
        return character
    return _SHORT.get(character) or _escape(ord(character))


def _escape(code: int) -> str:
    """The escape, by hand: the codec for it is a file, which a process that has no more files could not open."""
    if code <= 0xFF:  # noqa: PLR2004
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004
