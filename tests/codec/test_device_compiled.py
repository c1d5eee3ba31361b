"""The kernels that decode, compiled for GPUs that need not be there."""

from __future__ import annotations

import pytest

from kvwire.codec.gpu import decode_kernels as kernels
from kvwire.codec.gpu import reconstruct_kernels as placing
from kvwire.codec.gpu.staging import BLOCK

from .compiling import compile_for

DECODE = dict.fromkeys(("streams",), "*i64") | dict.fromkeys(("items", "progress", "flags", "peaks"), "*i32")
DECODE |= {"words16": "*u16", "words32": "*u32", "entries": "*u32", "lookup": "*u32", "thresholds": "*u32"}
DECODE |= {"values": "*i16", "patience": "i32"}
PLACE = {"tiles": "*i64", "chunks": "*i64", "blocks": "*i32", "group_slots": "*i32", "wide": "*i32", "flags": "*i32"}
PLACE |= {"values": "*i16", "slot_rows": "*i32", "slot_sizes": "*fp32", "token_ids": "*i32", "table": "*i8"}
PLACE |= {"cosines": "*fp32", "sines": "*fp32", "pages": "*i32", "steps": "*fp32", "groups": "i32", "first_tile": "i32"}


@pytest.mark.parametrize(("arch", "warps"), [(80, 2), (90, 2), ("gfx942", 1)])
def test_streams_compile(arch, warps):
    report = compile_for(kernels.decode_streams, DECODE, {"CHECK": True, "BLOCK": BLOCK}, arch, num_warps=warps)
    assert report.registers <= 64  # 32 warps and more fit a multiprocessor
    assert report.spilled <= 16  # descriptors, outside the loops


@pytest.mark.parametrize(
    ("arch", "out", "page"), [(90, "bfloat16", 0), (90, "float32", 16), (80, "bfloat16", 16), ("gfx942", "bfloat16", 0)]
)
def test_placing_compiles(arch, out, page):
    constant = {
        "PAGE": page, "OUT": out, "STRIDE": 1, "PRECISE": out != "bfloat16", "ALIGNED": True,
        "TOKENS": 128, "PAIRS": 64, "DEPTH": 64 if arch == 90 else 32, "INTERPRET": False,
    }  # fmt: skip
    report = compile_for(placing.place, PLACE, constant, arch, num_warps=8)
    assert report.spilled <= 16


ESCAPES = {"escapes": "*i64", "entries": "*u32", "values": "*i32", "counts": "*i32"}
PLACED = {**ESCAPES, "words32": "*u32", "peaks": "*i32", "flags": "*i32"}
LAST = {"group_slots": "*i32", "chunks": "*i64", "peaks": "*i32", "wide": "*i32", "most": "i32"}


@pytest.mark.parametrize(
    ("kernel", "signature", "constant"),
    [
        (kernels.count_escapes, ESCAPES, {"BLOCK": 1024}),
        (kernels.place_escapes, PLACED, {"BLOCK": 1024, "TOKENS": 4096}),
        (kernels.last_wide, LAST, {"BLOCK": 1024}),
    ],
)
def test_the_small_kernels_compile(kernel, signature, constant):
    assert not compile_for(kernel, signature, constant, 90).spilled
