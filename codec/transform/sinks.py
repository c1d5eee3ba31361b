"""Attention sinks: tokens that receive much attention and whose keys and values hardly depend on the token.

The first token of a text is one in most models. A few huge entries of its hidden state, the same for every token,
determine its keys and values in all but the first layers. They are small, and an error in them costs more than in any
other token. So a profile holds one row for all sinks, and a blob's header lists its sinks and their differences from
that row, more finely than the finest level. Segments do not code sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard

from kvwire.codec.format.codecs import MAX_SINKS
from kvwire.codec.format.metadata_json import decompress
from kvwire.codec.profile.group import unzigzag, zigzag
from kvwire.codec.transform.analysis import gather_planes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.codec.prediction.text import TextPredictor
    from kvwire.codec.profile.group import Group
    from kvwire.codec.profile.profile import Profile
    from kvwire.types import KVCache

NEARER = 0.25
"""A token is a sink where its squared distance to the sink row is below this share of that to its text's prediction."""
_LARGEST = 32767
_LEAST = 1e-30
_ROOM_BYTES = 1 << 20
"""Most bytes of a document's sinks in its header, which every reader fetches."""
_COMPARED = 1024
"""Most tokens that are compared in all groups."""
_SPAN = 1024
"""Tokens compared in one step."""


def find_sinks(cache: KVCache, text: TextPredictor) -> dict[int, bytes]:
    """Find the attention sinks: tokens nearer to the profile's sink row than to the prediction from their text.

    All tokens of which nothing is pruned are compared in the middle group, and those that pass in all groups. Returns
    frames by token index.
    """
    groups = text.profile.groups
    if not text.profile.has_sinks:
        return {}
    whole = np.ones(cache.tokens, bool)
    for mask in cache.kept or ():
        if mask is not None:
            whole &= mask.all(0).cpu().numpy()
    likely: list[int] = []
    for start in range(0, cache.tokens, _SPAN):
        stop = min(start + _SPAN, cache.tokens)
        by_text, by_sink, _ = _distances(cache, text, len(groups) // 2, start, stop)
        likely += (start + (whole[start:stop] & (by_sink < NEARER * by_text)).nonzero()[0]).tolist()
    found: dict[int, bytes] = {}
    room = _ROOM_BYTES
    for at in likely[:_COMPARED]:
        share, steps = compare(cache, text, at)
        if share < NEARER and float(np.abs(steps).max()) <= _LARGEST:
            frame = pack_sink(np.rint(steps).astype(np.int16))
            room -= len(frame)
            if room < 0 or len(found) == MAX_SINKS:
                break
            found[at] = frame
    return found


def frame_of_beginning(first: KVCache, profile: Profile) -> bytes:
    """Return the frame of a token that begins a prompt; empty where the profile has no sinks."""
    from kvwire.codec.prediction.text import TextPredictor

    if not profile.has_sinks:
        return b""
    text = TextPredictor(profile, 1, first.token_ids, None)
    steps = compare(first, text, 0)[1]
    return pack_sink(np.rint(steps).astype(np.int16)) if float(np.abs(steps).max()) <= _LARGEST else b""


def compare(cache: KVCache, text: TextPredictor, at: int) -> tuple[float, NDArray[np.float32]]:
    """Return a token's squared distance to the sink row over that to its prediction, and its difference in steps."""
    parts = [_distances(cache, text, group, at, at + 1) for group in range(len(text.profile.groups))]
    to_text, to_sink = (sum(float(part[which][0]) for part in parts) for which in (0, 1))
    return to_sink / max(to_text, _LEAST), np.concatenate([part[2][0] for part in parts])


def surprise(cache: KVCache, text: TextPredictor) -> NDArray[np.float32]:
    """Return all tokens' squared distances to their predictions, in the unit of ``compare``."""
    spans = [(start, min(start + _SPAN, cache.tokens)) for start in range(0, cache.tokens, _SPAN)]
    groups = range(len(text.profile.groups))
    return np.concatenate([sum(_distances(cache, text, group, *span)[0] for group in groups) for span in spans])


def _distances(
    cache: KVCache, text: TextPredictor, group: int, start: int, stop: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return squared distances to the prediction and to the sink row, and the differences to that row, in its steps."""
    chosen = text.profile.groups[group]
    elements = gather_planes(cache, chosen.planes, start, stop)
    rows, index = text.expected(group, start, stop)
    sink, unit = (torch.from_numpy(each) for each in (chosen.sink, chosen.sink_steps))
    apart = (elements - rows[torch.from_numpy(index.astype(np.int64))].float()) / unit
    steps = (elements - sink) / unit
    return apart.square().sum(1).numpy(), steps.square().sum(1).numpy(), steps.numpy()


def pack_sink(steps: NDArray[np.int16]) -> bytes:
    """Compress a sink's difference in steps."""
    raw = zigzag(steps).astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()
    return zstandard.ZstdCompressor(level=19, write_content_size=True).compress(raw)


def unpack_sink(frame: bytes, width: int) -> NDArray[np.int16]:
    """Undo ``pack_sink``."""
    raw = decompress(frame, 2 * width, "blob's attention sink")
    return unzigzag(np.frombuffer(raw, np.uint8).reshape(2, width).T.copy().view("<u2")[:, 0].astype(np.uint16))


def sink_rows(profile: Profile, frame: bytes) -> list[torch.Tensor]:
    """Decode a stored sink to float32 ``[1, width]`` for each group."""
    groups = profile.groups
    steps = unpack_sink(frame, sum(group.width for group in groups))
    parts = np.split(steps, np.cumsum([group.width for group in groups])[:-1])
    return [torch.from_numpy(_row(group, part))[None] for group, part in zip(groups, parts, strict=True)]


def _row(group: Group, steps: NDArray[np.int16]) -> NDArray[np.float32]:
    return group.sink + steps.astype(np.float32) * group.sink_steps
