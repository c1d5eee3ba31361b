"""Attention sinks: found by the profile's row, stored in the header, nearly exact at every level."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvwire.codec import BlobDecoder, Ladder, Profile, decode, encode, fit_profile, inspect, positions_off
from kvwire.codec.fitting.fit import identity_profile
from kvwire.codec.format.container import parse_header
from kvwire.codec.format.joining import join_headers
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.transform.analysis import gather_planes
from kvwire.codec.transform.sinks import NEARER, find_sinks, unpack_sink
from kvwire.reuse import LinkedPrompt
from kvwire.types import BlobPrefix, KVCache, digest_tokens

from . import surgery as cut
from .measures import measured
from .synthetic import DEEP, make_cache, make_hidden, make_statistics, stored_plainly, with_sinks
from .test_device_decode import _many_lanes, paged, pieces_of  # noqa: F401 - a fixture
from .test_lazy import Reader
from .write_golden import quantised

LADDER = Ladder(3.6, ("coarse", "standard", "fine", "finest"))
WIDTH = 116
BACKENDS = pytest.mark.parametrize("backend", ["numba", "triton"])


def document(tokens, seed, places=(0,), **how):
    return with_sinks(make_cache(tokens, seed, layers=DEEP, **how), places, seed=seed)


def fitted(caches, **how):
    return fit_profile(caches, make_statistics(DEEP, words=how.pop("words", True)), group_width=64, **how)


@pytest.fixture(scope="module")
def texts():
    return [document(300, seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def profile(texts):
    """Of two groups, whose texts begin with sinks."""
    return fitted(texts)


@pytest.fixture(scope="module")
def cache():
    """A document with a sink at its head and one in the middle."""
    return document(76, 7, (0, 40))


@pytest.fixture
def blob(cache, profile):
    """Of short lanes."""
    return encode(cache, profile, LADDER, chunk_tokens=32)


def unaware(profile):
    """The same profile without rows of sinks."""
    nothing = np.empty(0, np.float32)
    return replace(profile, groups=tuple(replace(g, sink=nothing, sink_steps=nothing) for g in profile.groups))


def rows_of(cache, at, profile):
    """Un-rotated elements of one token, all groups."""
    return torch.cat([gather_planes(cache, group.planes, at, at + 1)[0] for group in profile.groups])


def assert_sinks_near(decoded, cache, profile, places=(0, 40), shift=0, noise=1e-5):
    """Half a step from what they were, and a hundredth of the row, or what the dtype rounds."""
    steps = torch.from_numpy(np.concatenate([group.sink_steps for group in profile.groups]))
    for at in places:
        was, now = rows_of(cache, at, profile), rows_of(decoded, at + shift, profile)
        assert ((now - was).abs() <= 0.5 * steps + noise * was.abs().max()).all()
        assert (now - was).norm() < 1e-2 * was.norm()


def segments_of(blob):
    return [cut.segment(blob, cell) for cell in range(cut.cells(blob))]


# The fit


def test_a_profile_of_texts_that_begin_with_sinks_has_their_mean(texts, profile):
    assert profile.has_sinks
    for group in profile.groups:
        mean = torch.stack([gather_planes(each, group.planes, 0, 1)[0] for each in texts]).double().mean(0)
        np.testing.assert_allclose(group.sink, mean.numpy(), rtol=1e-5, atol=1e-6)
        assert group.sink_steps.shape == group.sink.shape
        assert (group.sink_steps > 0).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_texts_that_begin_as_they_go_on_teach_no_sinks(count):
    assert not fitted([make_cache(200, seed, layers=DEEP) for seed in range(count)]).has_sinks


def test_one_text_alone_teaches_a_sink_where_it_surprises_most():
    assert fitted([document(300, 1)]).has_sinks


def test_what_does_not_begin_a_text_teaches_no_sinks_and_sinks_do_not_weigh_on_the_fit(texts, profile):
    """But for them the profile is that of the texts without their first tokens."""
    rest = fitted([each.slice(1, each.tokens) for each in texts])
    assert not rest.has_sinks
    for ours, theirs in zip(profile.groups, rest.groups, strict=True):
        np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-3, atol=1e-3)
        assert ours.rank == theirs.rank


# Finding


def naive_sinks(cache, profile, text):
    """The places and numbers, token by token in float64."""
    found, middle = {}, len(profile.groups) // 2
    for at in range(cache.tokens):
        parts = []
        for number, group in enumerate(profile.groups):
            rows, index = text.expected(number, at, at + 1)
            x, e = gather_planes(cache, group.planes, at, at + 1)[0].double(), rows[int(index[0])].double()
            sink, unit = (torch.from_numpy(each).double() for each in (group.sink, group.sink_steps))
            parts.append((float(((x - e) / unit).square().sum()), (x - sink) / unit))
        to_text, to_sink = ([part[0] for part in parts], [float(part[1].square().sum()) for part in parts])
        if to_sink[middle] < NEARER * to_text[middle] and sum(to_sink) < NEARER * sum(to_text):
            found[at] = torch.cat([part[1] for part in parts]).round().numpy()
    return found


@pytest.mark.parametrize("kind", ["tokens", "mean", "hidden"])
def test_a_loop_over_tokens_finds_the_same(texts, cache, kind):
    hidden = [make_hidden(each) for each in texts] if kind == "hidden" else None
    known = fitted(texts, words=kind == "tokens", prefix_layers=2 * (kind == "hidden"), hidden=hidden)
    text = TextPredictor(known, cache.tokens, cache.token_ids, make_hidden(cache) if hidden else None)
    ours, theirs = find_sinks(cache, text), naive_sinks(cache, known, text)
    assert list(ours) == list(theirs) == [0, 40]
    for at, frame in ours.items():
        steps = unpack_sink(frame, WIDTH)
        assert abs(steps - theirs[at]).max() <= 1
        assert (steps == theirs[at]).mean() > 0.99  # but for those in the middle between two


def test_no_more_are_listed_than_readers_take(profile):
    crowded = document(90, 5, range(90))
    blob = encode(crowded, profile, LADDER)
    assert inspect(blob).sinks == tuple(range(64))
    assert_sinks_near(decode(blob, 0, profile), crowded, profile, (0, 63))


@BACKENDS
def test_documents_without_sinks_are_coded_as_ever(profile, texts, backend):
    for each in (make_cache(40, 9, layers=DEEP), texts[0].slice(1, 41)):
        blob, plain = (encode(each, used, LADDER, backend=backend) for used in (profile, unaware(profile)))
        assert inspect(blob).sinks == ()
        assert cut.get(blob, cut.BLOB_FIELDS, "incompatible") == 0
        assert "sinks" not in cut.metadata(blob)
        assert segments_of(blob) == segments_of(plain)


@BACKENDS
def test_a_pruned_cache_keeps_the_sinks_of_which_nothing_is_pruned(cache, profile, backend):
    kept = torch.rand(76, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[0] = True
    masks = [kept.expand(spec.kv_heads, -1).clone() for spec in DEEP]
    masks[1][0, 40], kept[40] = False, True
    pruned = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=masks)
    blob = encode(pruned, profile, LADDER, backend=backend)
    assert inspect(blob).sinks == (0,)
    for level in range(4):
        made = decode(blob, level, profile, backend=backend)
        assert_sinks_near(made, pruned, profile, (0,))
        assert not made.keys[1][0, 40].any()


@BACKENDS
def test_pruned_entries_of_a_sink_are_zero(cache, profile, backend):
    """As other writers may store them."""
    mask = torch.ones(2, 76, dtype=torch.bool)
    mask[0, 20] = False
    kept = [mask[: spec.kv_heads] if number == 1 else None for number, spec in enumerate(DEEP)]
    pruned = KVCache.from_tensors(cache.keys, cache.values, cache.meta, cache.token_ids, kept=kept)
    blob = encode(pruned, profile, LADDER)
    frame = cut.sink_frames(blob)[0]
    made = decode(cut.with_sinks(blob, [0, 20], [frame, frame]), 0, profile, backend=backend)
    assert not made.keys[1][0, 20].any()
    assert made.keys[0][:, 20].any()


# Decoding


@pytest.mark.parametrize(("backend", "offset"), [("numba", None), ("numba", 0), ("numba", 9), ("triton", 9)])
def test_sinks_are_nearly_exact_at_every_level(cache, profile, blob, backend, offset):
    assert inspect(blob).sinks == (0, 40)
    assert cut.get(blob, cut.BLOB_FIELDS, "incompatible") == 8
    for level in range(4):
        assert_sinks_near(decode(blob, level, profile, offset=offset, backend=backend), cache, profile)


@BACKENDS
def test_other_tokens_are_as_good_as_ever(cache, profile, backend):
    both = (profile, unaware(profile))
    blobs = [encode(cache, used, LADDER, chunk_tokens=32, backend=backend) for used in both]
    for level in range(4):
        ours, theirs = (decode(*each, backend="numba") for each in zip(blobs, [level] * 2, both, strict=True))
        for first, last in ((1, 40), (41, 76)):
            spans = [positions_off(each).slice(first, last) for each in (cache, ours, theirs)]
            error, before = (measured(spans[0], each, profile) for each in spans[1:])
            assert error == pytest.approx(before, rel=0.05)
        heads = [positions_off(each).slice(0, 1) for each in (cache, ours, theirs)]
        assert 10 * measured(*heads[:2], profile) < measured(heads[0], heads[2], profile)


@BACKENDS
def test_numba_and_triton_agree_on_both_ways(cache, profile, blob, backend):
    """Each decodes what the other encoded; segments leave sinks out."""
    other = encode(cache, profile, LADDER, chunk_tokens=32, backend=backend)
    finest = quantised(other, profile, 3)
    assert not finest[[0, 40]].any()
    assert finest[1:40].any(1).all()
    assert cut.sink_frames(other) == cut.sink_frames(blob)
    ours, theirs = (decode(other, 1, profile, backend=each) for each in ("numba", "triton"))
    for mine, its in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)
    for at in (0, 40):
        assert torch.equal(rows_of(ours, at, profile), rows_of(theirs, at, profile))


@BACKENDS
def test_pages_have_them_too_and_chunks_that_are_not_decoded_stay_empty(cache, profile, blob, backend):
    expected = decode(blob, 1, profile, offset=5)
    pages = paged(cache.meta, 76, dtype=torch.float32)
    decoder = BlobDecoder(blob, profile, out=pages, offset=5, backend=backend)
    for chunk in (1, 2, 0):
        decoder.decode_chunk(chunk, pieces_of(blob, chunk, 1))
    found = pages.read()
    for ours, theirs in zip((*found.keys, *found.values), (*expected.keys, *expected.values), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    decoder = BlobDecoder(blob, profile, backend=backend)
    decoder.decode_chunk(2, pieces_of(blob, 2, 0))
    assert all(not tensor[:, :64].any() for tensor in (*decoder.cache.keys, *decoder.cache.values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lossless_levels_stay_what_they_are(profile, dtype):
    cache = document(50, 4, dtype=dtype)
    blob = encode(cache, profile, LADDER, lossless=True)
    assert inspect(blob).sinks == (0,)
    decoder = BlobDecoder(blob, profile)
    decoder.decode_chunk(0, pieces_of(blob, 0, 4), 4)
    for exact in (decode(blob, "lossless", profile), decoder.cache):
        pairs = zip((*exact.keys, *exact.values), (*cache.keys, *cache.values), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    decoder.decode_chunk(0, pieces_of(blob, 0, 0), 0)
    noise = 1e-5 if dtype == torch.float32 else 8e-3
    assert_sinks_near(decoder.cache, cache, profile, (0,), noise=noise)


def test_parts_of_a_document_keep_theirs(profile):
    whole, blobs, start = document(50, 6, (0, 30)), [], 0
    for end in (20, 50):
        prefix = BlobPrefix(start, digest_tokens(whole.token_ids[:start]), "doc") if start else None
        blobs.append(encode(whole.slice(start, end), profile, LADDER, chunk_tokens=16, prefix=prefix))
        start = end
    assert [inspect(each).sinks for each in blobs] == [(0,), (10,)]
    header = join_headers([parse_header(each) for each in blobs])
    assert header.info.sinks == (0, 30)
    payload = b"".join(each[: inspect(each).header_bytes] for each in blobs)
    payload += b"".join(each[inspect(each).header_bytes :] for each in blobs)
    for level in range(4):
        decoder = BlobDecoder(header, profile, offset=2)
        for chunk in range(header.info.chunks):
            decoder.decode_chunk(chunk, [payload[s.offset : s.end] for s in header.info.reads(chunk, level)], level)
        assert_sinks_near(decoder.cache, whole, profile, (0, 30))


def test_each_document_of_a_prompt_has_its_own(profile, cache, blob):
    second = document(20, 8)
    prompt = LinkedPrompt([76, 20], cache.meta)
    for number, (data, each) in enumerate(((blob, cache), (encode(second, profile, LADDER), second))):
        out = prompt.document(number)
        decoder = BlobDecoder(data, profile, out=out, offset=prompt.offset(number))
        for chunk in range(inspect(data).chunks):
            decoder.decode_chunk(chunk, pieces_of(data, chunk, 0))
        assert_sinks_near(prompt.document(number), each, profile, (0, 40) if number == 0 else (0,))
    assert prompt.cache.tokens == 96
    assert_sinks_near(prompt.cache, second, profile, (0,), shift=76)


def test_a_document_without_positions_is_coded_alike(cache, profile, blob):
    """What is stored is un-rotated."""
    off = encode(positions_off(cache), profile, LADDER, chunk_tokens=32)
    pairs = zip(cut.sink_frames(off), cut.sink_frames(blob), strict=True)
    assert all(abs(unpack_sink(one, WIDTH) - unpack_sink(other, WIDTH)).max() <= 1 for one, other in pairs)
    assert inspect(off).sinks == (0, 40)


# Storage


@pytest.mark.parametrize("kind", ["rounded", "plain", "lazy"])
def test_a_stored_profile_keeps_its_row(profile, cache, blob, kind):
    made = stored_plainly(profile) if kind == "plain" else profile
    again = Reader(made.data).open() if kind == "lazy" else Profile.from_bytes(made.data)
    assert again.has_sinks
    for ours, theirs in zip(made.groups, again.groups, strict=True):
        assert np.array_equal(ours.sink, theirs.sink)
        assert np.array_equal(ours.sink_steps, theirs.sink_steps)
    mine = encode(cache, again, LADDER, chunk_tokens=32)
    assert cut.sink_frames(mine) == cut.sink_frames(blob)
    assert_sinks_near(decode(mine, 0, again), cache, profile)


def test_an_identity_keeps_its_row(cache):
    plain = identity_profile(cache, LADDER)
    rows = tuple(replace(g, sink=g.mean + 1, sink_steps=np.full_like(g.mean, 0.5)) for g in plain.groups)
    again = Profile.from_bytes(replace(plain, groups=rows).data)
    assert again.has_sinks
    assert all(np.array_equal(ours.sink, theirs.sink) for ours, theirs in zip(rows, again.groups, strict=True))
    assert not Profile.from_bytes(plain.data).has_sinks
