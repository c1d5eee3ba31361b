"""Attention without copies of keys for each head, beside torch's own with them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kvwire.engines.transformers.attending import attend, is_plain_attention, scale_of


def repeated(query, key, value, mask, scale):
    """The naive way: keys and values once for each head, all columns for every row."""
    groups = query.shape[1] // key.shape[1]
    key, value = (side.repeat_interleave(groups, 1) for side in (key, value))
    return scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 150), st.integers(0, 100), st.booleans(), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_it_equals_torchs_own(kv_heads, groups, rows, more, by_head, is_added, seed):
    draw = torch.Generator().manual_seed(seed)
    columns, heads = rows + more, kv_heads * groups
    query = torch.randn(1, heads, rows, 8, dtype=torch.float64, generator=draw)
    key = torch.randn(1, kv_heads, columns, 8, dtype=torch.float64, generator=draw)
    value = torch.randn(1, kv_heads, columns, 6, dtype=torch.float64, generator=draw)
    at = torch.randperm(columns, generator=draw)[:rows].sort().values
    mask = torch.rand(1, heads if by_head else 1, rows, columns, generator=draw) < 0.7
    mask = (mask & (torch.arange(columns) <= at[:, None])) | (torch.arange(columns) == at[:, None])
    if is_added:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, torch.finfo(torch.float64).min)
    found = attend(query, key, value, mask, (at + 1).tolist(), 0.3)
    assert found.shape == (1, rows, heads, 6)
    assert torch.allclose(found, repeated(query, key, value, mask, 0.3), atol=1e-12)


def test_what_is_more_than_plain_is_left_to_the_model():
    plain = {"scaling": 0.5, "dropout": 0.0, "sliding_window": 8, "softcap": None}
    assert is_plain_attention(plain)
    for more in ({"softcap": 50.0}, {"s_aux": torch.zeros(1)}, {"position_bias": torch.zeros(1)}):
        assert not is_plain_attention(plain | more)
    assert scale_of(torch.zeros(1, 1, 1, 16), {"scaling": 0.5}) == 0.5
    assert scale_of(torch.zeros(1, 1, 1, 16), {}) == 0.25
