"""Text from strangers on terminals and in logs."""

from __future__ import annotations

import logging
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire._printable import PrintableLines, name_problem, printable, printable_text

ANY_TEXT = st.text(st.characters(exclude_categories=()))
ORDINARY = (
    "plain text \\ with 100 %",
    "čeština",
    "日本語　の名前",
    "עברית",
    "العربية",
    "हिन्दी",
    "no break",
    "😀",
    "ǅ ﬁ ½",
)
HARMFUL = {
    "\x1b[31mred": "\\x1b[31mred",
    "two\nlines\r": "two\\nlines\\r",
    "c1 \x9b2J": "c1 \\x9b2J",
    "half \udcff": "half \\udcff",
    "\u202egnp.exe": "\\u202egnp.exe",
    "a\u2066b\u2069": "a\\u2066b\\u2069",
    "zero\u200bwidth\ufeff": "zero\\u200bwidth\\ufeff",
    "lines\u2028and\u2029": "lines\\u2028and\\u2029",
    "soft\xadhyphen": "soft\\xadhyphen",
    "tag\U000e0041": "tag\\U000e0041",
    "filler\u3164": "filler\\u3164",
}


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_of_any_script_stays(text):
    assert printable(text) == text
    assert printable_text(text) == text
    assert not name_problem(text)


@pytest.mark.parametrize(("text", "shown"), HARMFUL.items())
def test_what_is_invisible_or_steers_a_terminal_is_shown(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    {
        "cafe\u0301": "cafe\\u0301",
        "\u212b": "\\u212b",  # the sign of the unit, which is the letter
        "a\u0322\u0301": "a\u0322\\u0301",  # an accent that joins its letter across another mark
        "\u1112\u1161": "\u1112\\u1161",
        "q\u0301": "q\u0301",  # there is no shorter spelling
    }.items(),
)
def test_of_names_that_look_alike_all_but_one_show_how_they_are_spelt(text, shown):
    assert printable(text) == shown
    assert printable(unicodedata.normalize("NFC", text)) == unicodedata.normalize("NFC", text)


@given(ANY_TEXT, ANY_TEXT)
def test_texts_that_are_the_same_but_for_their_spelling_are_told_apart(text, other):
    for one in (text, unicodedata.normalize("NFD", text), other):
        normal = unicodedata.normalize("NFC", one)
        assert normal == one or printable(normal) != printable(one)


@given(ANY_TEXT)
def test_any_text_stays_on_its_line_and_can_be_encoded(text):
    shown = printable(text)
    assert not [each for each in shown if unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert shown.splitlines() in ([], [shown])
    shown.encode()
    assert printable(shown) == shown


@given(ANY_TEXT)
def test_running_text_keeps_its_lines_and_nothing_else(text):
    shown = printable_text(text)
    kept = set("\n\t\u200c\u200d")
    assert not [e for e in shown if unicodedata.category(e) in ("Cc", "Cf", "Cs", "Zl", "Zp") and e not in kept]
    assert shown.count("\n") == text.count("\n")
    shown.encode()


def test_persian_and_emoji_keep_their_joiners_in_running_text():
    text = "می\u200cروم 👩\u200d🚀 ❤\ufe0f\n"
    assert printable_text(text) == text


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b", "\x9b", "\udcff", "a\u202eb", "a\u2069", "\u200fa", "a\u2028", "\x7f"]
)
def test_names_that_deceive_are_refused(name):
    assert name_problem(name).startswith("U+")


@pytest.mark.parametrize("name", ["می\u200cروم", "👩\u200d🚀", "folder/file 2", "a\\b"])
def test_names_with_joiners_are_taken(name):
    assert not name_problem(name)


def test_a_record_and_its_traceback_forge_no_line(capsys):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableLines("%(levelname)s %(message)s"))
    logger = logging.Logger("forged")  # noqa: LOG001 - of this test alone
    logger.addHandler(handler)
    logger.warning("name %s", "a\nERROR forged \x1b[2J")
    try:
        raise ValueError("b\x1b[2J\u202e")  # noqa: TRY301 - a test of what it looks like
    except ValueError:
        logger.exception("failed")
    shown = capsys.readouterr().err
    assert shown.startswith("WARNING name a\\nERROR forged \\x1b[2J\n")
    assert not set(shown) & {"\x1b", "\u202e"}
    assert "ValueError: b\\x1b[2J\\u202e" in shown
