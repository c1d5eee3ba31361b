"""Pages as vLLM lays them out, without vLLM: six orders of strides, and blocks whose insides a kernel packs."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvwire.engines.vllm.pages import (
    PackedPages,
    PageFormat,
    StridedPages,
    learn_order,
    pairs_of_halves,
    probe,
    slots_of,
)
from kvwire.engines.vllm.working import check_layers
from kvwire.errors import ArgumentError, MismatchError
from kvwire.types import CacheMeta, LayerSpec

ORDERS = {
    "LBHNC": (0, 1, 2, 3), "LBNHC": (0, 1, 3, 2), "LHBNC": (0, 2, 1, 3),
    "BLHNC": (1, 0, 2, 3), "BLNHC": (1, 0, 3, 2), "BHLNC": (1, 2, 0, 3),
}  # fmt: skip
"""Of the axes layer, block, head and token in memory; what a token holds in a head comes last in all of them."""


def write_reference(view, key_dim, slots, keys, values):
    """What ``StridedPages.write`` does, element by element."""
    for token, slot in enumerate(slots.tolist()):
        block, place = divmod(slot, view.shape[2])
        for head in range(view.shape[1]):
            for element in range(view.shape[3]):
                source = keys[head, token] if element < key_dim else values[head, token]
                view[block, head, place, element] = source[element if element < key_dim else element - key_dim]


def views(order, layers, blocks, heads, tokens, width, dtype=torch.float32):
    """Logical ``[blocks, heads, tokens, width]`` for each layer, in one of vLLM's orders in memory."""
    sizes = (layers, blocks, heads, tokens)
    raw = torch.zeros(*(sizes[axis] for axis in ORDERS[order]), width, dtype=dtype)
    back = [ORDERS[order].index(axis) for axis in range(4)]
    return list(raw.permute(*back, 4))


def test_the_orders_are_six_different_ones():
    made = [views(order, 2, 3, 4, 16, 6) for order in ORDERS]
    assert len({(*each[0].stride(), each[1].storage_offset()) for each in made}) == 6
    assert all(ORDERS[order] in permutations(range(4)) for order in ORDERS)


@given(
    st.sampled_from(sorted(ORDERS)),
    st.sampled_from([16, 32, 48, 64, 128]),
    st.integers(1, 3),
    st.sampled_from([(4, 4), (2, 6)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**32 - 1),
)
def test_what_is_written_is_what_the_reference_writes(order, block_tokens, heads, dims, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    layers, blocks = 2, 6
    ours, theirs = (views(order, layers, blocks, heads, block_tokens, sum(dims), dtype) for _ in range(2))
    pages = StridedPages(ours, [dims[0]] * layers)
    table = torch.randperm(blocks, generator=generator).tolist()[:3]
    start = int(torch.randint(0, 2 * block_tokens, (), generator=generator))
    stop = min(3 * block_tokens, start + int(torch.randint(0, 40, (), generator=generator)))
    slots = slots_of(table, block_tokens, start, stop)
    for layer in range(layers):
        keys, values = (torch.randn(heads, stop - start, dim, generator=generator) for dim in dims)
        pages.write(layer, slots, keys, values)
        write_reference(theirs[layer], dims[0], slots, keys, values)
        back = pages.read(layer, slots)
        assert torch.equal(back[0], keys.to(dtype))
        assert torch.equal(back[1], values.to(dtype))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from([16, 64]), st.integers(0, 40))
def test_latents_lie_pair_by_pair(latent, half, block_tokens, start):
    """A latent as it is, and behind it the rotated numbers, whose halves become pairs."""
    view = torch.zeros(4, block_tokens, latent + 2 * half)
    pages = StridedPages([view.unsqueeze(1)], [latent], [PageFormat(order=pairs_of_halves(2 * half))])
    probe(pages)
    slots = slots_of([3, 1], block_tokens, start % block_tokens, start % block_tokens + block_tokens)
    keys, values = torch.randn(1, block_tokens, latent), torch.randn(1, block_tokens, 2 * half)
    pages.write(0, slots, keys, values)
    right = torch.zeros_like(view)
    for token, slot in enumerate(slots.tolist()):
        row = right[slot // block_tokens, slot % block_tokens]
        row[:latent] = keys[0, token]
        for pair in range(half):
            row[latent + 2 * pair] = values[0, token, pair]
            row[latent + 2 * pair + 1] = values[0, token, half + pair]
    assert torch.equal(view, right)
    for mine, right in zip(pages.read(0, slots), (keys, values), strict=True):
        assert torch.equal(mine, right)


def test_blocks_that_the_engine_splits_are_addressed_by_the_same_slots():
    """A manager's block of 128 tokens may be four of 32 in the view."""
    (view,) = views("LBHNC", 1, 12, 2, 32, 8)
    pages = StridedPages([view], [4])
    keys, values = torch.randn(2, 128, 4), torch.randn(2, 128, 4)
    pages.write(0, slots_of([2], 128, 0, 128), keys, values)
    assert torch.equal(view[8:12, :, :, :4].transpose(0, 1).reshape(2, 128, 4), keys)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9, unique=True), st.integers(1, 128), st.data())
def test_slots_are_those_of_a_loop(blocks, block_tokens, data):
    stop = data.draw(st.integers(0, len(blocks) * block_tokens))
    start = data.draw(st.integers(0, stop))
    expected = [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(start, stop)]
    assert slots_of(blocks, block_tokens, start, stop).tolist() == expected


def test_tokens_beyond_the_blocks_are_refused():
    with pytest.raises(ArgumentError, match="tokens 3 to 33 do not lie in 2 blocks of 16"):
        slots_of([4, 5], 16, 3, 33)


def packed(view, slots, keys, values, _form):
    """A kernel as on processors: a block's keys first, as ``[dim, tokens]`` of each head, then its values."""
    tokens, dim = view.shape[2], keys.shape[2]
    for token, slot in enumerate(slots.tolist()):
        block, place = divmod(slot, tokens)
        for head in range(view.shape[1]):
            raw = view[block, head].view(-1)
            raw[place : tokens * dim : tokens] = keys[token, head]
            raw[tokens * dim + place * values.shape[2] :][: values.shape[2]] = values[token, head]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [16, 128])
def test_a_packed_order_is_learnt_and_read(dtype, block_tokens):
    layers = views("LBHNC", 2, 4, 2, block_tokens, 12, dtype)
    pages = PackedPages(layers, [6, 6], packed)
    probe(pages)
    assert not any(view.any() for view in layers)
    slots = slots_of([3, 1], block_tokens, 5, block_tokens + 9)
    keys, values = (torch.randn(2, len(slots), 6).to(dtype) for _ in range(2))
    pages.write(1, slots, keys, values)
    back = pages.read(1, slots)
    assert torch.equal(back[0], keys)
    assert torch.equal(back[1], values)
    assert not torch.equal(torch.cat(StridedPages(layers, [6, 6]).read(1, slots), -1), torch.cat((keys, values), -1))


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 2.6)])
def test_fp8_pages_hold_a_number_over_its_scale(dtype, given, scales):
    form = PageFormat(dtype, given, *scales)
    pages = StridedPages(views("LBNHC", 1, 4, 2, 16, 10, torch.uint8), [4], [form])
    probe(pages)
    slots = slots_of([3, 1], 16, 5, 30)
    sides = [3 * torch.randn(2, 25, dim) for dim in (4, 6)]
    sides[0][0, 0, 0] = 1e6  # more than fp8 can say
    pages.write(0, slots, *sides)
    most = torch.finfo(dtype).max
    for side, back, scale in zip(sides, pages.read(0, slots), scales, strict=True):
        right = torch.tensor([min(max(float(x) / scale, -most), most) for x in side.to(given).flatten()])
        assert torch.equal(back.flatten(), right.to(dtype).float() * scale)


@pytest.mark.parametrize("dtype", FP8)
def test_a_packed_order_of_fp8_is_learnt_and_read(dtype):
    def kernel(view, slots, keys, values, form):
        sides = ((keys, form.key_scale), (values, form.value_scale))
        packed(view, slots, *((side.float() / scale).to(dtype).view(torch.uint8) for side, scale in sides), form)

    form = PageFormat(dtype, torch.bfloat16, 0.37, 2.6)
    pages = PackedPages(views("LBHNC", 1, 4, 2, 16, 12, torch.uint8), [6], kernel, [form])
    probe(pages)
    slots, sides = slots_of([3, 1], 16, 5, 25), [torch.randn(2, 20, 6).bfloat16() for _ in range(2)]
    pages.write(0, slots, *sides)
    strided = StridedPages(views("LBHNC", 1, 4, 2, 16, 12, torch.uint8), [6], [form])
    strided.write(0, slots, *sides)
    for mine, right in zip(pages.read(0, slots), strided.read(0, slots), strict=True):
        assert torch.equal(mine, right)


def test_a_kernel_that_drops_or_doubles_elements_is_refused():
    def doubling(view, slots, keys, values, form):
        packed(view, slots, keys, values, form)
        view[:, 0, 0, 0] = view[:, 0, 1, 0]

    with pytest.raises(MismatchError, match="in a place of its own"):
        learn_order(views("LBHNC", 1, 2, 2, 16, 8)[0], 4, doubling, PageFormat())


def test_a_layout_that_does_not_give_back_what_was_written_is_refused():
    class Forgetful(StridedPages):
        def read(self, layer, slots):
            keys, values = super().read(layer, slots)
            return values, keys

    class Spilling(StridedPages):
        def write(self, layer, slots, keys, values):
            super().write(layer, slots, keys, values)
            self.views[layer][1] = 1.0

    for wrong in (Forgetful, Spilling):
        with pytest.raises(MismatchError, match="loads nothing into it"):
            probe(wrong(views("LBNHC", 1, 3, 2, 16, 8), [4]))
    for order in ORDERS:
        probe(StridedPages(views(order, 2, 3, 2, 16, 8), [4, 4]))


@pytest.mark.parametrize(
    "view", [torch.zeros(2, 2, 16, 8, dtype=torch.uint8), torch.zeros(2, 16, 8), torch.zeros(2, 2, 16, 4)]
)
def test_views_of_an_unknown_shape_are_refused(view):
    with pytest.raises(MismatchError, match="does not know this layout"):
        StridedPages([view], [4])


def test_a_packed_block_in_pieces_is_refused():
    with pytest.raises(MismatchError, match="one run of memory"):
        PackedPages(views("LHBNC", 1, 3, 2, 16, 8), [4], packed)


@pytest.mark.parametrize(
    ("spec", "say"),
    [
        (LayerSpec(3, 4, 4, rope=0), "2 heads of 8 elements, the documents' caches 3 of 8"),
        (LayerSpec(2, 8, 8, rope=0), "2 heads of 8 elements, the documents' caches 2 of 16"),
    ],
)
def test_pages_of_other_layers_are_refused(spec, say):
    pages = StridedPages(views("LBHNC", 1, 3, 2, 16, 8), [4])
    check_layers(pages, CacheMeta(layers=(LayerSpec(2, 4, 4, rope=0),)))
    check_layers(pages, CacheMeta(layers=(LayerSpec(4, 4, 4, rope=0),)))  # this worker's half of the heads
    check_layers(pages, CacheMeta(layers=(LayerSpec(0, 0, 0, "none"), LayerSpec(2, 4, 4, "sliding", 0, 64))))
    with pytest.raises(MismatchError, match=say):
        check_layers(pages, CacheMeta(layers=(spec,)))
    with pytest.raises(MismatchError, match="pages of 1 layers, the documents are of 2"):
        check_layers(pages, CacheMeta(layers=(spec, spec)))
