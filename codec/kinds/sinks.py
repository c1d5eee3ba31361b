"""Attention sinks, written over what was decoded in their places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.codec.kinds.outputs import positions_for
from kvwire.codec.planes import SIDES
from kvwire.codec.transform.analysis import scatter_planes
from kvwire.codec.transform.sinks import sink_rows
from kvwire.types import KVCache, PagedKVCache

if TYPE_CHECKING:
    from kvwire.codec.format.header import Header
    from kvwire.codec.planes import Side
    from kvwire.codec.profile.profile import Profile


class SinkPlacer:
    """Knows the sinks of one blob, at the positions of one output."""

    def __init__(
        self, header: Header, profile: Profile, out: KVCache | PagedKVCache, offset: int | None, *, begins: bool
    ) -> None:
        """Compute the sinks' keys and values; the first token's, too, where the document begins a prompt."""
        info = header.info
        cos_sin = positions_for(info, offset)
        self._out, self._sinks = out, {}
        frames = dict(zip(info.sinks, header.sink_frames, strict=True))
        if begins and header.beginning:
            frames[0] = header.beginning
        for at, frame in frames.items():
            keys = [part.new_zeros(spec.kv_heads, 1, spec.key_dim, device="cpu")
                    for spec, part in zip(info.meta.layers, out.keys, strict=True)]  # fmt: skip
            values = [part.new_zeros(spec.kv_heads, 1, spec.value_dim, device="cpu")
                      for spec, part in zip(info.meta.layers, out.values, strict=True)]  # fmt: skip
            made = KVCache(keys, values, info.meta)
            for group, row in zip(profile.groups, sink_rows(profile, frame), strict=True):
                scatter_planes(row, group.planes, made, info.meta, 0, cos_sin(at, at + 1))
            self._sinks[at] = made

    def place(self, start: int, stop: int) -> bool:
        """Write the sinks of a span of tokens; on a GPU, on the current queue."""
        chosen = [at for at in self._sinks if start <= at < stop]
        for at in chosen:
            for layer, spec in enumerate(self._out.meta.layers):
                for side in SIDES if spec.kind != "none" else ():
                    self._put(side, layer, at)
        return bool(chosen)

    def _put(self, side: Side, layer: int, at: int) -> None:
        made, out = self._sinks[at], self._out
        part = (made.keys if side == "key" else made.values)[layer]
        target = (out.keys if side == "key" else out.values)[layer]
        part = part.to(target.device, non_blocking=True)
        if isinstance(out, PagedKVCache):
            out.put(side, layer, at, part)
        else:
            target[:, at : at + 1] = part
