"""What is timed, shape by shape and length by length."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import kvwire
from gpu_parts import baselines, cachegen_triton, ours, roofline, shapes, synthetic
from gpu_parts.prefill import Prefill
from gpu_parts.timing import wall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_parts.shapes import Shape
    from gpu_parts.timing import Device
    from kvwire import KVCache, Profile

_ROTATED_BYTES = 1 << 30
"""Caches up to this size are decoded from several copies of their blob in turn; larger ones leave no cache warm."""
_COPIES = 3
_SPARE_BYTES = 3 << 30
_NEEDED_CACHES = 4
"""Caches that a measurement holds at most: the original, the output, quantised values or int8, a working set."""
_SMALL_TOKENS = 256


@dataclass(frozen=True)
class Plan:
    """What to measure. sizes: of the profiles. loads: of a small blob, to see whether memory leaks."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    levels: tuple[int, ...]
    sizes: synthetic.Sizes
    loads: int = 1000


def run(plan: Plan, device: Device, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, as it is saved."""
    limits = {
        "copy": baselines.copy_rate(device),
        "upload": baselines.upload_rate(device),
        "matmul": baselines.matmul_rate(device),
    }
    say(
        f"copies move {limits['copy']['gb_s']:.0f} GB/s, pinned memory arrives at {limits['upload']['gb_s']:.0f} GB/s, "
        f"bfloat16 products reach {limits['matmul']['tflop_s']:.0f} TFLOP/s"
    )
    skipped: list[str] = []
    found = {shape.name: _shape(shape, plan, device, limits, skipped, say) for shape in plan.shapes}
    say(f"{plan.loads} loads of a small blob")
    return {
        "device": device.facts(),
        "synthetic": synthetic.description(),
        "limits": limits,
        "shapes": found,
        "leak": leak(plan, device),
        "skipped": skipped,
    }


def _shape(
    shape: Shape, plan: Plan, device: Device, limits: dict[str, Any], skipped: list[str], say: Callable[[str], None]
) -> dict[str, Any]:
    say(f"{shape.title}: profile")
    profile = synthetic.make_profile(shape, device.device, plan.sizes)
    documents: dict[str, Any] = {}
    for tokens in plan.tokens:
        needed, free = _NEEDED_CACHES * shape.cache_bytes(tokens) + _SPARE_BYTES, device.free_bytes()
        if needed > free:
            skipped.append(f"{shape.name}, {tokens} tokens: needs {needed:,} bytes of device memory, {free:,} are free")
            say(skipped[-1])
            continue
        say(f"{shape.title}, {tokens:,} tokens")
        try:
            documents[str(tokens)] = document(shape, profile, tokens, plan, device, limits)
        except torch.OutOfMemoryError:
            skipped.append(f"{shape.name}, {tokens} tokens: ran out of device memory")
            say(skipped[-1])
        gc.collect()
    resident = ours.profile_bytes(profile, device.device)  # now that it has been used
    del profile
    gc.collect()
    if documents:
        say(f"{shape.title}: prefill")
        _add_prefill(shape, documents, device, skipped)
    return {"title": shape.title, "width": shape.width, "profile_bytes": resident, "documents": documents}


def _add_prefill(shape: Shape, documents: dict[str, Any], device: Device, skipped: list[str]) -> None:
    """Fill in every document's prefill, shortest first, as far as memory allows."""
    lengths = sorted(map(int, documents))
    try:
        prefill = Prefill(shape, lengths[0], device)
        for length in lengths:
            documents[str(length)]["prefill"] = prefill.measure(length)
    except torch.OutOfMemoryError:
        skipped.append(f"{shape.name}: prefill ran out of device memory")


def document(
    shape: Shape, profile: Profile, tokens: int, plan: Plan, device: Device, limits: dict[str, Any]
) -> dict[str, Any]:
    """One document of a shape: encoding, every level's decode, the rivals; prefill is filled in later."""
    cache = synthetic.make_cache(shape, profile, tokens, device.device)
    blob = ours.encode(cache, profile)
    encoding = wall(lambda: ours.encode(cache, profile), device)
    out = _like(cache)
    info = kvwire.inspect(blob)
    levels = {}
    for level in plan.levels:
        levels[info.levels[level].name] = decoded(blob, level, profile, out, device, limits)
        gc.collect()
    return {
        "cache_bytes": cache.nbytes,
        "blob_bytes": len(blob),
        "encode_ms": encoding,
        "encode_gb_s": _gb_s(cache.nbytes, encoding["median"]),
        "levels": levels,
        "rivals": rivals(cache, out, device),
        "copy_ms": device.timed(baselines.copy_cases(cache, out)),
        "prefill": {},
    }


def decoded(
    blob: bytes, level: int, profile: Profile, out: KVCache, device: Device, limits: dict[str, Any]
) -> dict[str, Any]:
    """One level: both halves of the decode alone, from pinned memory to the cache, the whole call, memory."""
    info = kvwire.inspect(blob)
    decoder = ours.decoder_of(blob, profile, out)
    copies = _COPIES if out.nbytes <= _ROTATED_BYTES else 1
    loads = [ours.Load(decoder, ours.pieces_of(blob, level)) for _ in range(copies)]
    staging = wall(loads[0].stage, device)
    ready = device.timed([load.ready for load in loads])
    upload = device.timed([load.upload for load in loads])
    entropy = device.timed([load.entropy for load in loads])
    place = device.timed([load.place for load in loads])
    staged_bytes = loads[0].staged_bytes
    del loads, decoder
    gc.collect()

    def call() -> object:
        return ours.decode(blob, level, profile, device.device, torch.bfloat16)

    whole = wall(call, device)
    extra = device.peak_extra(call) - out.nbytes
    work = roofline.work_of(info, level, profile)
    both = entropy["median"] + place["median"]
    return {
        "level": level,
        "bits_per_element": info.levels[level].bits_per_element,
        "coded_share": work.coded / (info.tokens * sum(group.width for group in profile.groups)),
        "staged_bytes": staged_bytes,
        "stage_ms": staging,
        "upload_ms": upload,
        "entropy_ms": entropy,
        "entropy_gsym_s": work.symbols / entropy["median"] / 1e6,
        "place_ms": place,
        "decode_ms": both,
        "decode_gb_s": _gb_s(out.nbytes, both),
        "ready_ms": ready,
        "call_ms": whole,
        "peak_extra_bytes": extra,
        "peak_extra_share": extra / out.nbytes,
        "roofline": roofline.judged(work, entropy["median"], place["median"], limits),
    }


def rivals(cache: KVCache, out: KVCache, device: Device) -> dict[str, Any]:
    """CacheGen, int8 and the raw cache: bytes, milliseconds on the device, milliseconds from pinned memory."""
    return {"CacheGen": _cachegen(cache, device), "int8": _int8(cache, out, device), "raw bfloat16": _raw(out, device)}


def _cachegen(cache: KVCache, device: Device) -> dict[str, Any]:
    host = cachegen_triton.encode(cache)
    pinned = [[device.pinned(tensor) for tensor in streams.wire] for streams in host]
    there = [streams.to(device.device) for streams in host]
    outputs = [streams.output() for streams in there]

    def decode() -> None:
        for streams, output in zip(there, outputs, strict=True):
            cachegen_triton.decode(streams, output)

    def ready() -> None:
        for streams, wire, output in zip(there, pinned, outputs, strict=True):
            for target, source in zip(streams.wire, wire, strict=True):
                target.copy_(source, non_blocking=True)
            cachegen_triton.decode(streams.on(streams.wire), output)

    return _rival(sum(streams.nbytes for streams in host), cache, device, decode, ready)


def _int8(cache: KVCache, out: KVCache, device: Device) -> dict[str, Any]:
    quantised = [baselines.quantise_int8(tensor) for tensor in baselines.tensors_of(cache)]
    size = baselines.int8_bytes(quantised)
    upload, targets = baselines.Upload(size, device), baselines.tensors_of(out)

    def decode() -> None:
        baselines.dequantise_int8(quantised, targets)

    def ready() -> None:
        upload()
        decode()

    return _rival(size, cache, device, decode, ready)


def _raw(out: KVCache, device: Device) -> dict[str, Any]:
    upload = baselines.Upload(out.nbytes, device)
    return {"bits_per_element": 16.0, "ready_ms": device.timed([upload])}


def _rival(
    size: int, cache: KVCache, device: Device, decode: Callable[[], None], ready: Callable[[], None]
) -> dict[str, Any]:
    decoding = device.timed([decode])
    return {
        "bits_per_element": 16 * size / cache.nbytes,
        "decode_ms": decoding,
        "decode_gb_s": _gb_s(cache.nbytes, decoding["median"]),
        "ready_ms": device.timed([ready]),
    }


def leak(plan: Plan, device: Device) -> dict[str, Any]:
    """Device memory before and after many loads of a small blob."""
    shape = replace(plan.shapes[0], layers=min(2, plan.shapes[0].layers))
    tokens = min(_SMALL_TOKENS, *plan.tokens)
    profile = synthetic.make_profile(shape, device.device, plan.sizes)
    blob = ours.encode(synthetic.make_cache(shape, profile, tokens, device.device), profile)
    level = plan.levels[0]
    for _ in range(2):
        ours.decode(blob, level, profile, device.device, torch.bfloat16)
    gc.collect()
    before = device.allocated()
    for _ in range(plan.loads):
        ours.decode(blob, level, profile, device.device, torch.bfloat16)
    gc.collect()
    after = device.allocated()
    return {
        "loads": plan.loads,
        "tokens": tokens,
        "layers": shape.layers,
        "before_bytes": before,
        "after_bytes": after,
        "leaked_bytes": after - before,
    }


def _like(cache: KVCache) -> KVCache:
    keys, values = ([torch.empty_like(tensor) for tensor in side] for side in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)


def _gb_s(size: int, ms: float) -> float:
    return size / ms / 1e6 if ms > 0 else 0.0


def dry(names: Sequence[str], device: Device, say: Callable[[str], None]) -> dict[str, Any]:
    """Every timed call once or twice on tiny shapes, so that none fails an hour later; its figures mean nothing."""
    tiny = tuple(shapes.tiny(shapes.named(name)) for name in names)
    return run(Plan(tiny, (3, 6), (0, 1), synthetic.TINY, loads=2), device, say)
