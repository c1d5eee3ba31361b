"""How chunks lie in LMCache's objects and SGLang's pages: fast ways against naive ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire import KVCache
from kvwire.engines.lmcache.layout import ObjectLayout
from kvwire.engines.sglang.pages import ORDERS, check_pool, flat_page
from kvwire.errors import ArgumentError, MismatchError
from kvwire.runtime.adapters import uniform
from kvwire.types import CacheMeta, LayerSpec


def write_reference(layout, target, cache):
    """What ``ObjectLayout.write`` writes, element by element."""
    fused = layout.shapes[tuple(target.shape)]
    rows = target.view(-1, layout.layers, layout.tokens, target.shape[-1])
    for side, tensors in enumerate((cache.keys, cache.values)):
        for layer, tensor in enumerate(tensors):
            for place, head in enumerate(range(layout.heads.start, layout.heads.stop)):
                for token in range(layout.tokens):
                    for element in range(layout.dim):
                        row, column = _place(layout, fused, side, place, token, element)
                        rows[0 if fused else side, layer, row, column] = tensor[head, token, element]


def _place(layout, fused, side, head, token, element):
    """Row and column of one number."""
    dim, block = layout.dim, layout.cpu_block
    if not block:
        return token, (2 * head + side) * dim + element if fused else head * dim + element
    first, at = token - token % block, token % block
    inside = block * dim + at * dim + element if side else element * block + at
    return first + inside // (2 * dim), head * 2 * dim + inside % (2 * dim)


def flat_page_reference(cache, heads, layout, tokens):
    """What ``flat_page`` gives, element by element."""
    layers, many, dim = len(cache.keys), heads.stop - heads.start, cache.keys[0].shape[-1]
    sizes = (layers, tokens, many, dim)
    order = ORDERS[layout]
    page = cache.keys[0].new_zeros(2, *(sizes[axis] for axis in order))
    for side, tensors in enumerate((cache.keys, cache.values)):
        for layer in range(layers):
            for token in range(tokens):
                for head in range(many):
                    at = (layer, token, head)
                    place = tuple(at[axis] for axis in order[:3])
                    page[(side, *place)] = tensors[layer][heads.start + head, token]
    return page.flatten()


def meta_of(layers, heads, dim, **changes):
    spec = LayerSpec(heads, dim, changes.pop("value_dim", dim), **changes)
    return CacheMeta("m", "r", "", "float32", (spec,) * layers)


def cache_of(layers, heads, tokens, dim):
    torch.manual_seed(1)
    keys, values = ([torch.randn(heads, tokens, dim) for _ in range(layers)] for _ in range(2))
    return KVCache.from_tensors(keys, values, meta_of(layers, heads, dim))


sizes = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(1, 4))


@settings(max_examples=30)
@given(sizes, st.integers(1, 4), st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_objects_are_written_as_the_naive_way_does(size, workers, worker, dtype):
    layers, heads, tokens, dim = size
    if worker >= workers or (heads % workers and workers % heads):
        return
    layout = ObjectLayout.of(meta_of(layers, heads, dim), tokens, workers << 24 | worker << 16 | workers << 8 | worker)
    cache = cache_of(*size)
    for shape in layout.shapes:
        fast, slow = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        layout.check([shape], [dtype])
        layout.write(fast, cache)
        write_reference(layout, slow, cache)
        assert torch.equal(fast, slow)
        assert fast.abs().sum() > 0


@settings(max_examples=30)
@given(sizes, st.integers(1, 3))
def test_packed_objects_are_written_as_the_naive_way_does(size, blocks):
    layers, heads, block, dim = size
    tokens = blocks * block
    layout = ObjectLayout.of(meta_of(layers, heads, dim), tokens, 0, block)
    cache = cache_of(layers, heads, tokens, dim)
    (shape,) = layout.shapes
    fast, slow = torch.zeros(shape), torch.zeros(shape)
    layout.write(fast, cache)
    write_reference(layout, slow, cache)
    assert torch.equal(fast, slow)
    assert sorted(fast.flatten()) == sorted(torch.cat([each.flatten() for each in (*cache.keys, *cache.values)]))


@settings(max_examples=30)
@given(sizes, st.sampled_from(sorted(ORDERS)))
def test_pages_are_what_the_naive_way_gives(size, layout):
    cache, tokens, heads = cache_of(*size), size[2], slice(0, size[1])
    assert torch.equal(flat_page(cache, heads, layout, tokens), flat_page_reference(cache, heads, layout, tokens))


def test_objects_of_another_model_are_refused():
    layout = ObjectLayout.of(meta_of(3, 4, 16), 64, 0)
    for shapes, dtypes in (
        ([[2, 3, 128, 64]], [torch.float32]),  # chunks of another length
        ([[2, 4, 64, 64]], [torch.float32]),
        ([[2, 3, 64, 32]], [torch.float32]),
        ([[2, 3, 64, 64]], [torch.uint8]),
        ([[2, 3, 64, 64]], [None]),
        ([[2, 3, 64, 64]] * 2, [torch.float32] * 2),
        ([], []),
    ):
        with pytest.raises(MismatchError, match="serve that model"):
            layout.check(shapes, dtypes)
    with pytest.raises(ArgumentError, match="a chunk of 5 tokens"):
        layout.write(torch.zeros(2, 3, 64, 64), cache_of(3, 4, 5, 16))
    with pytest.raises(ArgumentError, match="cannot be divided"):
        ObjectLayout.of(meta_of(3, 4, 16), 64, 3 << 24)
    with pytest.raises(ArgumentError, match="blocks of 48"):
        ObjectLayout.of(meta_of(3, 4, 16), 64, 0, 48)
    with pytest.raises(MismatchError, match="serve that model"):
        ObjectLayout.of(meta_of(3, 4, 16), 64, 0, 32).check([[3, 64, 128]], [torch.bfloat16])


def test_models_of_several_kinds_of_layers_are_refused():
    for changes in ({"value_dim": 8}, {"kind": "sliding", "window": 8}):
        with pytest.raises(MismatchError, match="several kinds"):
            uniform(meta_of(2, 2, 16, **changes))
    assert uniform(meta_of(2, 2, 16)) == (2, 16)


def pool(**changes):
    given = {
        "layout": "page_first", "dtype": torch.float32, "page_size": 32, "layer_num": 2, "head_num": 2, "head_dim": 16,
    }  # fmt: skip
    return SimpleNamespace(**given | changes)


def test_pools_of_another_model_are_refused():
    check_pool(pool(), 2, 2, 16, 32)
    others = {"page_size": 64, "layer_num": 3, "head_num": 1, "head_dim": 8, "dtype": torch.uint8, "v_head_dim": 8}
    for changes in ({name: value} for name, value in others.items()):
        with pytest.raises(MismatchError, match="--page-size"):
            check_pool(pool(**changes), 2, 2, 16, 32)
    with pytest.raises(MismatchError, match="does not know"):
        check_pool(pool(layout="page_unified"), 2, 2, 16, 32)
