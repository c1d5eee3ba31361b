"""Tokenizers that would take memory or time without end: refused before they are opened, or told of."""

from __future__ import annotations

import base64
import json

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvwire.engines.transformers import open_engine
from kvwire.engines.transformers.tokenizer_limits import check_tokenizer, growth
from kvwire.errors import CorruptError

from .families import config_of, make_model

WORDS = {"<unk>": 0, "a": 1, "b": 2}


def tokenizer(**parts):
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))  # noqa: S106 - no password
    for name, part in ({"pre_tokenizer": pre_tokenizers.Whitespace()} | parts).items():
        setattr(made, name, part)
    return made


@pytest.fixture
def folder(tmp_path):
    make_model(config_of("llama")).save_pretrained(tmp_path)
    return tmp_path


def saved(folder, made):
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)  # noqa: S106
    return folder


def doubling(times):
    return [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * times


def charsmap(*texts):
    trie = bytes(8)
    data = len(trie).to_bytes(4, "little") + trie + b"\0".join(text.encode() for text in texts) + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


@pytest.mark.parametrize(
    ("rules", "factor"),
    [
        (None, 1),
        ({"type": "Lowercase"}, 1),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, 1),
        ({"type": "Replace", "pattern": {"String": "\u2581"}, "content": ""}, 1),
        ({"type": "Replace", "pattern": {"String": "ab"}, "content": "abab"}, 2),
        ({"type": "Replace", "pattern": {"String": ""}, "content": "xx"}, 3),
        (replace(" {2,}", "\u2581"), 1),
        (replace("(?=a)", "a"), 2),
        (replace("a*", "bb"), 3),
        (charsmap("a", "1\u20442", "\ufdfa" * 18), 18),
        ({"type": "Sequence", "normalizers": doubling(5)}, 32),
        ({"type": "Sequence", "decoders": [*doubling(2), {"type": "Sequence", "decoders": doubling(3)}]}, 32),
        ({"type": "Sequence", "normalizers": [charsmap("xx"), *doubling(1)]}, 4),
    ],
)
def test_rules_grow_texts_by_a_factor(rules, factor):
    assert growth(rules) == factor


@pytest.mark.parametrize("pattern", ["(?=a)", "a*", "", "\\b", "a{0,2}", "x|"])
def test_the_factor_is_no_less_than_what_the_library_makes(pattern):
    rule = normalizers.Replace(Regex(pattern), "yz")
    assert len(rule.normalize_str("aab" * 50)) <= growth(replace(pattern, "yz")) * 150 + 2


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_blows_texts_up_is_not_opened(folder, part):
    """A text of one letter would take a terabyte; and so would opening it, where an added token holds that letter."""
    saved(folder, tokenizer())
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole[part] = {"type": "Sequence", f"{part}s": doubling(40)}
    added = {"id": 3, "content": "a", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    whole["added_tokens"].append(added | {"special": False})
    path.write_text(json.dumps(whole))
    with pytest.raises(CorruptError, match=r"1\.1e\+12 characters of one"):
        open_engine(folder)


def test_a_map_of_characters_that_blows_texts_up_is_not_opened(folder):
    saved(folder, tokenizer())
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": charsmap("x" * 1000)}))
    with pytest.raises(CorruptError, match="1e\\+03 characters of one"):
        open_engine(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "tokenizer.model", "merges.txt"])
def test_a_huge_tokenizer_is_not_opened(folder, name):
    saved(folder, tokenizer())
    with (folder / name).open("wb") as file:
        file.truncate(1 << 36)  # 64 GiB, of which the disk holds none
    with pytest.raises(CorruptError, match="more than any tokenizer"):
        open_engine(folder)


REPLACE = {"type": "Replace", "pattern": 3, "content": "x"}
NONE = ('{"Replace"', '["Replace"]', '"Replace"', '{"normalizer": "Replace"}', json.dumps({"normalizer": REPLACE}),
        '{"normalizer": ' + '["Replace",' * 10**5)  # fmt: skip


@pytest.mark.parametrize("text", NONE, ids=range(len(NONE)))
def test_rules_that_are_none(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(CorruptError, match="copy its files again"):
        check_tokenizer([path])


def test_a_search_without_end_is_told_of(folder, capfd):
    """The library stops it by a panic, which is no ``Exception``, and writes a trace of its own to stderr."""
    made = tokenizer(pre_tokenizer=pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"))
    engine = open_engine(saved(folder, made))
    assert engine.tokenize("a") == [1]
    with pytest.raises(CorruptError, match="rules fail on this text") as caught:
        engine.tokenize("x" * 100)
    assert caught.value.__cause__ is None
    assert "retry-limit" in capfd.readouterr().err


def test_ordinary_rules_are_opened(folder):
    rules = [normalizers.NFKC(), normalizers.Replace("``", '"'), normalizers.Replace(Regex(" {2,}"), " "),
             normalizers.Prepend("a"), normalizers.Lowercase()]  # fmt: skip
    engine = open_engine(saved(folder, tokenizer(normalizer=normalizers.Sequence(rules))))
    assert engine.tokenize(" B  b", place="first") == [1, 2, 2]
