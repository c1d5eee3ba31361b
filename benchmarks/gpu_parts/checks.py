"""What must hold before anything is timed: the device decodes what the processor decodes, and so do the rivals."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cachegen_kernels
import numpy as np
import torch
from cachegen import STREAM_TOKENS

import kvwire
from gpu_parts import baselines, cachegen_triton, ours, shapes, synthetic
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gpu_parts.shapes import Shape
    from kvwire import KVCache, Profile

_TOLERANCE = 1e-2
"""Relative L2 error of a bfloat16 decode against the processor's in float32: rounding alone makes 2e-3."""
_WORST = 0.03
"""Largest difference over the largest number."""
_GUARD = 3.0
_TOKENS = 300
_FEW_TOKENS = 20
"""In the interpreter, where a symbol takes milliseconds."""
_HEAD_CRC, _META_STORED, _ENTRY_CRC, _PROLOGUE, _ENTRY = 36, 40, 16, 64, 32
"""Of docs/format.md: where a blob keeps its checksums."""


@dataclass(frozen=True, eq=False)
class Case:
    """A cache of some shape with its profile, its blob as the processor writes it, and where the device is."""

    shape: Shape
    profile: Profile
    cache: KVCache
    blob: bytes
    device: torch.device
    chunk_tokens: int

    @property
    def interpreted(self) -> bool:
        """Whether little must do."""
        return self.device.type == "cpu"

    @property
    def levels(self) -> range:
        """Levels of the blob that are looked at."""
        return range(0, 4, 2) if self.interpreted else range(len(kvwire.inspect(self.blob).levels))

    def dtypes(self, level: int) -> tuple[torch.dtype, ...]:
        """What a level is decoded to."""
        others = level == 0 or not self.interpreted
        return (torch.bfloat16, torch.float16, torch.float32) if others else (torch.bfloat16,)


def cases(device: torch.device, names: list[str]) -> Iterator[Case]:
    """Every shape in small; on a GPU also with its own widths, four layers of it."""
    for shape in map(shapes.named, names):
        yield _case(shapes.tiny(shape), synthetic.TINY, device)
        if device.type == "cuda":
            yield _case(replace(shape, name=f"{shape.name}, 4 layers", layers=4), synthetic.Sizes(2048), device)


def _case(shape: Shape, sizes: synthetic.Sizes, device: torch.device) -> Case:
    host = torch.device("cpu")
    profile = synthetic.make_profile(shape, host, sizes)
    kvwire.Profile.from_bytes(profile.data)  # refuses what readers would
    tokens, chunk_tokens = (_FEW_TOKENS, 16) if device.type == "cpu" else (_TOKENS, 128)
    cache = synthetic.make_cache(shape, profile, tokens, host)
    blob = kvwire.encode(cache, profile, chunk_tokens=chunk_tokens, backend="numba")
    return Case(shape, profile, cache, blob, device, chunk_tokens)


def run(device: torch.device, names: list[str], say: Callable[[str], None]) -> list[str]:
    """Run every check; returns what was checked, raises AssertionError where something does not hold."""
    done = []
    for case in cases(device, names):
        for check in CHECKS:
            said = f"{case.shape.name}: {check(case)}"
            say(said)
            done.append(said)
    return done


def flat(cache: KVCache) -> Tensor:
    """All numbers of a cache, float32, on the host."""
    return torch.cat([tensor.float().cpu().flatten() for tensor in baselines.tensors_of(cache)])


def compare(found: Tensor, wanted: Tensor, what: str) -> float:
    """Relative L2 error of numbers against those of the processor; raises AssertionError where they are not close."""
    error = float((found - wanted).norm() / wanted.norm())
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < _TOLERANCE, f"{what}: relative error {error:.2g}, allowed {_TOLERANCE}"
    assert worst < _WORST, f"{what}: largest difference {worst:.2g} of the largest number, allowed {_WORST}"
    return error


def decoding(case: Case) -> str:
    """Tensors of every level, in every dtype."""
    errors = []
    for level in case.levels:
        wanted = flat(kvwire.decode(case.blob, level, case.profile, dtype=torch.float32, backend="numba"))
        for dtype in case.dtypes(level):
            found = ours.decode(case.blob, level, case.profile, case.device, dtype)
            errors.append(compare(flat(found), wanted, f"{case.shape.name}, level {level}, {dtype}"))
    return f"{len(errors)} decodes equal the processor's within a relative error of {max(errors):.1e}"


def symbols(case: Case) -> str:
    """Quantised values of every coded column, all chunks."""
    level = 1 if case.interpreted else case.levels[-1]
    out = ours.moved(case.cache, case.device)  # tensors of the right shapes; nothing is written there
    load = ours.Load(ours.decoder_of(case.blob, case.profile, out), ours.pieces_of(case.blob, level))
    pairs = ours.symbols(load, case.profile)
    assert len(pairs) == kvwire.inspect(case.blob).chunks
    assert all(np.array_equal(*pair) for pair in pairs), f"{case.shape.name}: symbols differ from the processor's"
    return f"{sum(found.size for found, _ in pairs)} symbols of level {level} equal the processor's"


def encoding(case: Case) -> str:
    """The device's blob is as close to the cache as the processor's, and as long."""
    on_device = ours.moved(case.cache, case.device)
    blob = ours.encode(on_device, case.profile, case.chunk_tokens)
    assert abs(len(blob) / len(case.blob) - 1) < _TOLERANCE, f"{len(blob)} bytes, the processor's has {len(case.blob)}"
    exact = flat(case.cache)
    for level in case.levels:
        errors = [
            float((flat(kvwire.decode(b, level, case.profile, dtype=torch.float32)) - exact).norm())
            for b in (blob, case.blob)
        ]
        assert errors[0] < 1.02 * errors[1], f"level {level}: error {errors[0]:.4g}, the processor's is {errors[1]:.4g}"
    return "the device's blob is as close and as long as the processor's"


def damage(case: Case) -> str:
    """A flipped bit is refused: by its checksum, and where the checksums were mended, by what it decodes to."""
    info = kvwire.inspect(case.blob)
    level = 1
    at = info.segments[-1][level].end - 1  # within the last lane's words
    for mended in (False, True):
        try:
            ours.decode(flipped(case.blob, at, mended=mended), level, case.profile, case.device, torch.bfloat16)
        except CorruptError:
            continue
        raise AssertionError(f"{case.shape.name}: a flipped bit was decoded (checksums mended: {mended})")
    return "damaged segments raise CorruptError, with wrong checksums and with mended ones"


def flipped(blob: bytes, at: int, *, mended: bool) -> bytes:
    """A blob with one bit of byte ``at``, which lies in a segment, flipped; mended: checksums fit the damage."""
    damaged = bytearray(blob)
    damaged[at] ^= 0x10
    if mended:
        info = kvwire.inspect(blob)
        segment = next(s for row in info.segments for s in row if s.offset <= at < s.end)
        (metadata,) = struct.unpack_from("<I", blob, _META_STORED)
        entry = _PROLOGUE + metadata + _ENTRY * (segment.chunk * len(info.levels) + segment.level)
        struct.pack_into("<I", damaged, entry + _ENTRY_CRC, zlib.crc32(damaged[segment.offset : segment.end]))
        struct.pack_into("<I", damaged, _HEAD_CRC, 0)
        struct.pack_into("<I", damaged, _HEAD_CRC, zlib.crc32(damaged[: info.header_bytes]))
    return bytes(damaged)


def guards(case: Case) -> str:
    """A decode into the middle of a longer prompt's cache leaves all else as it was."""
    tokens, before, after = case.cache.tokens, 7, 5
    whole = [
        torch.full((t.shape[0], before + tokens + after, t.shape[2]), _GUARD, dtype=torch.bfloat16, device=case.device)
        for t in baselines.tensors_of(case.cache)
    ]
    layers = len(case.cache.keys)
    inner = [tensor[:, before : before + tokens] for tensor in whole]
    out = replace(case.cache, keys=inner[:layers], values=inner[layers:])
    ours.decode_into(case.blob, 1, case.profile, out)
    wanted = kvwire.decode(case.blob, 1, case.profile, dtype=torch.float32, backend="numba")
    compare(flat(out), flat(wanted), f"{case.shape.name}, into a longer cache")
    for tensor in whole:
        outside = (tensor[:, :before], tensor[:, before + tokens :])
        assert all(bool((part == _GUARD).all()) for part in outside), f"{case.shape.name}: wrote outside of its output"
    return "a decode into a longer cache writes its own tokens and nothing else"


def cachegen(case: Case) -> str:
    """The Triton kernel decodes what the processor's kernel decodes, bit for bit."""
    for streams in cachegen_triton.encode(case.cache):
        there = streams.to(case.device)
        found = cachegen_triton.decode(there, there.output()).cpu()
        assert torch.equal(found, cachegen_on_host(streams)), f"{case.shape.name}: CacheGen decodes otherwise"
    return "CacheGen's kernel equals the processor's, bit for bit"


def cachegen_on_host(streams: cachegen_triton.Streams) -> Tensor:
    """Planes as the processor's kernel decodes them, bfloat16 ``[planes, heads, tokens, dim]``."""
    out = streams.output()
    words, starts, stored = streams.words.numpy().view(np.uint16), streams.starts.numpy(), streams.stored.numpy()
    for plane in range(streams.planes):
        bits = out[plane].view(torch.int16).numpy().view(np.uint16)
        scales, most = streams.scales[plane].float().numpy(), int(streams.most[plane])
        cachegen_kernels.decode_plane(words, starts[plane], stored[plane], scales, most, STREAM_TOKENS, False, bits)
    return out


def int8(case: Case) -> str:
    """Half a step at most is lost, beside the rounding to bfloat16."""
    for tensor in baselines.tensors_of(case.cache):
        there = tensor.to(case.device)
        quantised = baselines.quantise_int8(there)
        out = torch.empty_like(there)
        baselines.dequantise_int8([quantised], [out])
        allowed = quantised[1] / 2 + there.float().abs() / 128 + quantised[1] / 128
        assert bool(((out.float() - there.float()).abs() <= allowed).all()), f"{case.shape.name}: int8 loses more"
    return "int8 loses half a step at most"


CHECKS = (decoding, symbols, encoding, damage, guards, cachegen, int8)
