"""The Triton kernel from values to the engine's tensors; its readable twin is ``reconstruct_reference``.

No kernel checks an index: ``staging`` and ``tiles`` make the descriptors.

bfloat16 is rounded by integer arithmetic on the bits, because Triton's interpreter truncates; there, products take
float32 operands of the same values.
"""
# ruff: noqa: ANN001, ANN202, C901, PLR0912, PLR0913, PLR0915, PLR0917, PLR2004
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from kvwire.codec.gpu.decode_kernels import CHUNK_FIELDS

TILE_FIELDS = tl.constexpr(18)
"""Fields of a tile, int64: rows, predictor, mean (addresses), width, group, token features, first column of a and of b,
pairs of a and of b, output strides of a token and of a page, first output element of a and of b, index of its first
cosine (-1: not rotated), cosines of a token, prediction from hidden states (address or 0), output (address)."""


@triton.jit
def _rounded(x, INTERPRET: tl.constexpr):
    """Round to bfloat16, ties to even; in the interpreter, return the same number as float32."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def _operand(x, INTERPRET: tl.constexpr):
    """Convert a stored bfloat16 or int8 matrix to the dtype of the dot's operands."""
    if INTERPRET:
        return x.to(tl.float32)
    return x.to(tl.bfloat16)


@triton.jit
def _sizes(values_at, size_at, rows, slots, inside, k, stop):
    """Dequantise values at step 1, float32 ``[tokens, slots]``.

    Runs of 16 slots are read; past ``stop`` the padding holds arbitrary finite numbers, which meet rows of zeros.
    """
    padded = tl.multiple_of((stop + 15) // 16 * 16, 16)
    within = k < padded
    q = tl.load(values_at + (rows[:, None] * slots + k[None, :]), mask=inside[:, None] & within[None, :], other=0)
    q = q.to(tl.int32)
    one = tl.load(size_at + 2 * k, mask=within, other=1.0)
    two = tl.load(size_at + 2 * k + 1, mask=within, other=2.0)
    size = tl.abs(q).to(tl.float32)
    size = tl.where(size == 1.0, one[None, :], tl.where(size == 2.0, two[None, :], size))
    return tl.where(q < 0, -size, size)


@triton.jit(do_not_specialize=["groups", "first_tile"])
def place(
    tiles,
    chunks,
    blocks,
    group_slots,
    wide,
    flags,
    values,
    slot_rows,
    slot_sizes,
    token_ids,
    table,
    cosines,
    sines,
    pages,
    steps,
    groups,
    first_tile,
    PAGE: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    PRECISE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Write one tile of a plane for one block of tokens: prediction plus inverse transform, rotated.

    A tile is up to PAIRS pairs of dimensions of one KV head, (a + STRIDE * j, b + STRIDE * j), which rotate together
    or are two halves of dimensions that do not rotate.
    """
    block = tl.program_id(0)
    tile = tiles + (first_tile + tl.program_id(1)).to(tl.int64) * TILE_FIELDS
    chunk = tl.load(blocks + 2 * block)
    begin = tl.load(blocks + 2 * block + 1)
    if tl.load(flags + chunk) != 0:
        return
    described = chunks + chunk.to(tl.int64) * CHUNK_FIELDS
    slots = tl.multiple_of(tl.load(described + 1).to(tl.int32), 16)
    tokens = tl.load(described + 2).to(tl.int32)
    slot_at = tl.load(described + 3)
    said_at = tl.load(described + 5)
    rows = begin + tl.arange(0, TOKENS)
    inside = rows < tokens
    j = tl.arange(0, PAIRS)
    width = tl.load(tile + 3).to(tl.int32)
    group = tl.load(tile + 4).to(tl.int32)
    features = tl.multiple_of(tl.load(tile + 5).to(tl.int32), 16)
    a, b = tl.load(tile + 6).to(tl.int32), tl.load(tile + 7).to(tl.int32)
    pairs_a, pairs_b = tl.load(tile + 8).to(tl.int32), tl.load(tile + 9).to(tl.int32)
    if ALIGNED:
        a, b, width = tl.multiple_of(a, 8), tl.multiple_of(b, 8), tl.multiple_of(width, 8)
        pairs_a, pairs_b = tl.multiple_of(pairs_a, 8), tl.multiple_of(pairs_b, 8)
    in_a, in_b = j < pairs_a, j < pairs_b
    of_a, of_b = a + STRIDE * j, b + STRIDE * j

    # The prediction from the text.
    mean = tl.load(tile + 2).to(tl.pointer_type(tl.float32))
    mean_a = tl.load(mean + of_a, mask=in_a, other=0.0)
    mean_b = tl.load(mean + of_b, mask=in_b, other=0.0)
    sum_a = tl.zeros([TOKENS, PAIRS], tl.float32)
    sum_b = tl.zeros([TOKENS, PAIRS], tl.float32)
    predictor = tl.multiple_of(tl.load(tile + 1).to(tl.pointer_type(tl.bfloat16)), 16)
    ids = tl.load(token_ids + said_at + rows, mask=inside, other=0).to(tl.int64)
    for first in range(0, features, DEPTH):
        k = first + tl.arange(0, DEPTH)
        within = k < features
        said = tl.load(table + (ids[:, None] * features + k[None, :]), mask=inside[:, None] & within[None, :], other=0)
        said = _operand(said, INTERPRET)
        at = k[:, None].to(tl.int64) * width
        to_a = tl.load(predictor + (at + of_a[None, :]), mask=within[:, None] & in_a[None, :], other=0.0)
        to_b = tl.load(predictor + (at + of_b[None, :]), mask=within[:, None] & in_b[None, :], other=0.0)
        sum_a = tl.dot(said, _operand(to_a, INTERPRET), sum_a, input_precision="ieee")
        sum_b = tl.dot(said, _operand(to_b, INTERPRET), sum_b, input_precision="ieee")
    sum_a += mean_a[None, :]
    sum_b += mean_b[None, :]
    if features > 0:
        sum_a = _rounded(sum_a, INTERPRET).to(tl.float32)
        sum_b = _rounded(sum_b, INTERPRET).to(tl.float32)
    addition = tl.load(tile + 16)
    if addition != 0:
        more = addition.to(tl.pointer_type(tl.float32))
        at = (said_at + rows)[:, None].to(tl.int64) * width
        sum_a += tl.load(more + (at + of_a[None, :]), mask=inside[:, None] & in_a[None, :], other=0.0)
        sum_b += tl.load(more + (at + of_b[None, :]), mask=inside[:, None] & in_b[None, :], other=0.0)

    # Plus the coded difference. All is in units of a step, so that one accumulator suffices.
    step = tl.load(steps + chunk)
    got_a = sum_a * (1.0 / step)
    got_b = sum_b * (1.0 / step)
    values_at = values + tl.multiple_of(tl.load(described), 16)
    size_at = slot_sizes + 2 * slot_at
    row_at = slot_rows + slot_at
    basis = tl.multiple_of(tl.load(tile).to(tl.pointer_type(tl.bfloat16)), 16)
    slot0 = tl.multiple_of(tl.load(group_slots + 2 * (chunk * groups + group)), 16)
    slot1 = tl.load(group_slots + 2 * (chunk * groups + group) + 1)
    split = slot1
    if not PRECISE:
        split = tl.load(wide + chunk * groups + group)
    for first in range(slot0, split, DEPTH):
        k = first + tl.arange(0, DEPTH)
        within = k < split
        size = _sizes(values_at, size_at, rows, slots, inside, k, split)
        at = tl.load(row_at + k, mask=within, other=0)[:, None].to(tl.int64) * width
        to_a = tl.load(basis + (at + of_a[None, :]), mask=within[:, None] & in_a[None, :], other=0.0)
        to_b = tl.load(basis + (at + of_b[None, :]), mask=within[:, None] & in_b[None, :], other=0.0)
        to_a, to_b = _operand(to_a, INTERPRET), _operand(to_b, INTERPRET)
        high = _rounded(size, INTERPRET)
        rest = size - high.to(tl.float32)
        middle = _rounded(rest, INTERPRET)
        if PRECISE:
            low = _rounded(rest - middle.to(tl.float32), INTERPRET)
            got_a = tl.dot(low, to_a, got_a, input_precision="ieee")
            got_b = tl.dot(low, to_b, got_b, input_precision="ieee")
        got_a = tl.dot(middle, to_a, got_a, input_precision="ieee")
        got_b = tl.dot(middle, to_b, got_b, input_precision="ieee")
        got_a = tl.dot(high, to_a, got_a, input_precision="ieee")
        got_b = tl.dot(high, to_b, got_b, input_precision="ieee")
    if not PRECISE:
        # The remaining slots are narrow, exact in one bfloat16; the first block masks the wide slots before them.
        for first in range(split // 16 * 16, slot1, DEPTH):
            k = first + tl.arange(0, DEPTH)
            within = (k >= split) & (k < slot1)
            size = _rounded(_sizes(values_at, size_at, rows, slots, inside, k, slot1), INTERPRET)
            at = tl.load(row_at + k, mask=within, other=0)[:, None].to(tl.int64) * width
            to_a = tl.load(basis + (at + of_a[None, :]), mask=within[:, None] & in_a[None, :], other=0.0)
            to_b = tl.load(basis + (at + of_b[None, :]), mask=within[:, None] & in_b[None, :], other=0.0)
            got_a = tl.dot(size, _operand(to_a, INTERPRET), got_a, input_precision="ieee")
            got_b = tl.dot(size, _operand(to_b, INTERPRET), got_b, input_precision="ieee")
    left = got_a * step
    right = got_b * step

    # Rotate to the positions.
    turn = tl.load(tile + 14)
    if turn >= 0:
        at = (said_at + rows)[:, None] * tl.load(tile + 15) + (turn + j)[None, :]
        seen = inside[:, None] & in_a[None, :]
        cos = tl.load(cosines + at, mask=seen, other=1.0)
        sin = tl.load(sines + at, mask=seen, other=0.0)
        rotated = left * cos - right * sin
        right = right * cos + left * sin
        left = rotated

    # Store.
    token = (tl.load(described + 4) + rows).to(tl.int64)  # index in the output
    if PAGE > 0:
        page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
        at = page * tl.load(tile + 11) + (token % PAGE) * tl.load(tile + 10)
    else:
        at = token * tl.load(tile + 10)
    to_a, to_b = tl.load(tile + 12), tl.load(tile + 13)
    if ALIGNED:
        at, to_a, to_b = tl.multiple_of(at, 8), tl.multiple_of(to_a, 8), tl.multiple_of(to_b, 8)
    at_a = at[:, None] + (to_a + STRIDE * j)[None, :]
    at_b = at[:, None] + (to_b + STRIDE * j)[None, :]
    here_a, here_b = inside[:, None] & in_a[None, :], inside[:, None] & in_b[None, :]
    where = tl.load(tile + 17)
    if OUT == "bfloat16":
        out = where.to(tl.pointer_type(tl.uint16))
        if ALIGNED:
            out = tl.multiple_of(out, 16)
        left_bits, right_bits = left.to(tl.uint32, bitcast=True), right.to(tl.uint32, bitcast=True)
        left_bits = (left_bits + (0x7FFF + ((left_bits >> 16) & 1))) >> 16
        right_bits = (right_bits + (0x7FFF + ((right_bits >> 16) & 1))) >> 16
        tl.store(out + at_a, left_bits.to(tl.uint16), mask=here_a)
        tl.store(out + at_b, right_bits.to(tl.uint16), mask=here_b)
    elif OUT == "float16":
        out = where.to(tl.pointer_type(tl.float16))
        if ALIGNED:
            out = tl.multiple_of(out, 16)
        most = 65504.0
        tl.store(out + at_a, tl.minimum(tl.maximum(left, -most), most).to(tl.float16), mask=here_a)
        tl.store(out + at_b, tl.minimum(tl.maximum(right, -most), most).to(tl.float16), mask=here_b)
    else:
        out = where.to(tl.pointer_type(tl.float32))
        if ALIGNED:
            out = tl.multiple_of(out, 16)
        tl.store(out + at_a, left, mask=here_a)
        tl.store(out + at_b, right, mask=here_b)
