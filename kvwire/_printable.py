"""Escape untrusted text for terminals and logs: invisible and control characters."""

from __future__ import annotations

import logging
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    _Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_SPACE = "Zs"  # visible, although ``str.isprintable`` says no
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
"""Line ends, and characters that Persian, Indic scripts and emoji need."""
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
    r"""Escape untrusted text, such as a name or a message, into one line.

    Control characters, line ends, surrogates, bidirectional controls and characters of no width become escapes such as
    ``\x1b``. Letters of all scripts and spaces of all widths stay. A combining mark is escaped if Unicode has one
    character for letter and mark: the two spellings would look alike.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text) if _is_usual(text) else _as_spelt(text))


def printable_text(text: str) -> str:
    """``printable`` for running text: line ends, tabs, joiners and variation selectors stay."""
    return "".join(each if each in _OF_TEXT else _shown(each) for each in text)


def name_problem(name: str) -> str:
    """Why a new name is refused because it would deceive its readers; empty if it is fine."""
    for each in name:
        what = _REFUSED.get(unicodedata.category(each), "")
        if each in _MARKS or unicodedata.bidirectional(each) in _BIDI_CLASSES:
            what = "a mark that turns the direction of writing"
        if what:
            return f"U+{ord(each):04X}, {what}"
    return ""


class PrintableLines(logging.Formatter):
    """Log lines that only kvwire can begin, and that cannot control a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Format and escape the record."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:  # noqa: N802 - logging's name
        """Format and escape a traceback."""
        return printable_text(super().formatException(ei))


def _is_usual(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text)


def _as_spelt(text: str) -> Iterator[str]:
    """Escape marks that have another spelling of the same look."""
    before = ""  # a letter and its marks
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
    """Escape by hand: the codec is imported from a file, which fails when a process is out of file descriptors."""
    if code <= 0xFF:  # noqa: PLR2004
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004
