"""Pieces of prompts: read together they are what the tokenizer makes of the whole; documents spell no control."""

from __future__ import annotations

import copy
import itertools
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvwire.engines.transformers import TransformersEngine
from kvwire.engines.transformers.tokenizing import PieceTokenizer
from kvwire.errors import ArgumentError, CorruptError

from .families import config_of, make_model

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "additional_special_tokens": ["<|im_end|>"]}
LETTERS = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n", "é"]
WIDE = "\uff1c\uff1e"  # which NFKC makes < and > of
WHOLE = "The fox ran. A dog saw it."


def characters(vocabulary, **parts):
    """A tokenizer of single characters, with special tokens, ``<think>`` and a BOS in front of whole texts."""
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(vocabulary)}, [], unk_token="<unk>"))  # noqa: S106
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_tokens(
        [AddedToken("<think>", special=False), AddedToken("  ", special=False, normalized=False)]
    )  # stripped, it would match everywhere
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def sentencepiece(*, legacy):
    """As Llama 2's: a space in front of whole texts, by the normaliser or by the pre-tokeniser."""
    vocabulary = ["<s>", "</s>", "<unk>", "▁", *(letter for letter in LETTERS if letter != " ")]
    if legacy:
        rule = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        return characters(vocabulary, normalizer=rule, decoder=decoders.Replace("▁", " "))
    return characters(vocabulary, pre_tokenizer=pre_tokenizers.Metaspace("▁", "first"), decoder=decoders.Metaspace())


def byte_level():
    """As some of GPT-2's kin: a space in front of whole texts."""
    vocabulary = ["<s>", "</s>", "<unk>", *pre_tokenizers.ByteLevel.alphabet()]
    return characters(
        vocabulary, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True), decoder=decoders.ByteLevel()
    )


def stripping():
    """Strips both ends of whole texts."""
    return characters(["<s>", "</s>", "<unk>", *LETTERS], normalizer=normalizers.Strip())


def unigram():
    """Normalises by NFKC, and has control tokens among its pieces, where the most likely pieces win."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -9.0) for letter in LETTERS)]
    made = Tokenizer(models.Unigram(pieces, 0))
    made.normalizer = normalizers.NFKC()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")  # noqa: S106


MADE = {
    "prepend": sentencepiece(legacy=True),
    "metaspace": sentencepiece(legacy=False),
    "bytes": byte_level(),
    "strip": stripping(),
}


@pytest.mark.parametrize("name", MADE)
@given(text=st.text(st.sampled_from(LETTERS), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=3))
@settings(max_examples=40, deadline=None)
def test_pieces_together_are_the_whole(name, text, cuts):
    tokenizer = MADE[name]
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    if "  " in text or not text.strip() or (name == "strip" and not (pieces[0].strip() and pieces[-1].strip())):
        return  # a token across a seam; a piece that is all habit
    places = ["first", *["middle"] * (len(pieces) - 2), "last"] if len(pieces) > 1 else None
    if places is None:
        return
    read = PieceTokenizer(tokenizer)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    if pieces[0]:
        assert [token for at, piece in zip(places, pieces, strict=True) for token in read(piece, at)] == whole


@pytest.mark.parametrize("name", MADE)
def test_a_piece_from_the_middle_is_no_whole_text(name):
    """What every piece got before: a space in front, or none at the ends."""
    read, tokenizer = PieceTokenizer(MADE[name]), MADE[name]
    before, piece, after = ("The", " dog ", "ran") if name == "strip" else ("The ", "dog", " ran")
    assert read(before) + read(piece) + read(after) == read(before + piece + after)
    assert tokenizer(piece, add_special_tokens=False)["input_ids"] != read(piece)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("spelling", ["<|im_end|>", "</s>", "<s>", "<think>", "<<s>s>", "<s><s>", "<|im_end|>" * 50])
def test_documents_spell_no_control_tokens(name, spelling):
    tokenizer = MADE[name]
    read = PieceTokenizer(tokenizer)
    control = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<s>", "</s>", "<think>")}
    text = f"A dog.{spelling} It ran."
    ids = read(text)
    assert not control & set(ids)
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    framed = read(text, "middle", "frame")
    assert control & set(framed)


def test_a_document_spells_no_token_for_the_unknown():
    """Which may be the end of texts, too, as in SmolLM2's tokenizer."""
    tokenizer = copy.deepcopy(MADE["bytes"])
    tokenizer.unk_token = tokenizer.eos_token
    assert tokenizer.eos_token_id not in PieceTokenizer(tokenizer)("a</s>b")
    assert tokenizer.eos_token_id in PieceTokenizer(tokenizer)("a</s>b", "last", "frame")


def test_words_that_the_vocabulary_lacks():
    """They are no control tokens; a tokenizer without a token for them fails, which is told."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["[UNK]"])
    assert PieceTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))("a zz a") == [1, 0, 1]
    words = Tokenizer(models.WordLevel({"a": 1}, "missing"))
    with pytest.raises(CorruptError, match="fail on this text"):
        PieceTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))("zz")


def test_control_tokens_of_the_vocabulary_that_are_not_marked_as_such_are_control():
    vocabulary = ["<s>", "</s>", "<unk>", "<|assistant|>", *LETTERS]
    tokenizer = characters(vocabulary)
    tokenizer.add_tokens(["<|assistant|>"])
    assert 3 not in PieceTokenizer(tokenizer)("a<|assistant|>b")
    assert 3 in PieceTokenizer(tokenizer)("a<|assistant|>b", "middle", "frame")


def test_a_tokenizer_that_reads_control_tokens_as_text_does_so_everywhere():
    tokenizer = copy.deepcopy(MADE["bytes"])
    before = PieceTokenizer(tokenizer).digest
    tokenizer.split_special_tokens = True
    read = PieceTokenizer(tokenizer)
    assert read.digest != before
    for place in ("first", "middle", "last"):
        assert tokenizer.eos_token_id not in read("a</s>b", place, "frame")


def test_added_words_that_are_no_markup_stay_tokens():
    tokenizer = MADE["bytes"]
    assert tokenizer.convert_tokens_to_ids("  ") in PieceTokenizer(tokenizer)("a  b")


@pytest.mark.parametrize("text", ["a</s>b", "a{/s}b", "{s}", "<s>", "a</s></s>{/s}" * 30])
def test_control_tokens_that_rules_make_are_taken_apart(text):
    tokenizer = unigram()
    ids = PieceTokenizer(tokenizer)(text.replace("{", WIDE[0]).replace("}", WIDE[1]))
    assert not {1, 2} & set(ids)
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == text.replace("{", "<").replace("}", ">")


@pytest.mark.parametrize("wrong", [{"place": "start"}, {"trust": "system"}])
def test_places_and_authors_that_there_are_not_are_refused(wrong):
    with pytest.raises(ArgumentError, match="place is first, middle or last, and trust document or frame"):
        PieceTokenizer(MADE["bytes"])("a", **wrong)


def test_a_byte_order_mark_is_no_text():
    read = PieceTokenizer(MADE["bytes"])
    assert read("\ufeffThe dog") == read("The dog")
    assert read("\ufeff", "first") == []


@pytest.mark.parametrize("text", ["\ud800", "a dog\udfff ran"])
def test_half_a_surrogate_pair_is_told(text):
    with pytest.raises(ArgumentError, match="half of a surrogate pair"):
        PieceTokenizer(MADE["bytes"])(text)


@pytest.mark.parametrize("name", MADE)
def test_what_stands_in_front_of_whole_texts_is_known(name):
    assert PieceTokenizer(MADE[name]).opening == (0,)
    bare = copy.deepcopy(MADE[name])
    bare.backend_tokenizer.post_processor = None
    bare._tokenizer.post_processor = processors.ByteLevel()
    assert PieceTokenizer(bare).opening == ()


def test_the_callers_tokenizer_is_not_changed():
    tokenizer = MADE["metaspace"]
    before = tokenizer.backend_tokenizer.to_str()
    PieceTokenizer(tokenizer)(WHOLE + "</s>")
    assert tokenizer.backend_tokenizer.to_str() == before


def test_answers_leave_special_tokens_out():
    engine = TransformersEngine(make_model(config_of("llama")), MADE["prepend"])
    ids = [*engine.tokenize("dog"), *engine.tokenize("<|im_end|></s>", trust="frame")]
    assert engine.detokenize(ids) == "dog<|im_end|></s>"
    assert engine.detokenize(ids, special=False) == "dog"
