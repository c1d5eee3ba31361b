"""Decode on a GPU: segments in the host's memory become tensors in the engine's layout.

A batch of chunks passes three queues: its bytes are copied, its streams decoded, its elements placed. Two batches are
in flight, so that copying, decoding and placing overlap without waiting for the host or the caller's stream. The GPU
detects damaged chunks and leaves their output unchanged; ``Pending.wait`` raises their errors.
"""

from __future__ import annotations

import threading
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch

from kvwire.codec.backend import interpreted
from kvwire.codec.gpu import decode_kernels, reconstruct_kernels
from kvwire.codec.gpu.batch import UploadedBatch, Workspace
from kvwire.codec.gpu.profile import on_device
from kvwire.codec.gpu.reconstruct_reference import reconstruct_reference
from kvwire.codec.gpu.staging import BLOCK, DeviceBatch, ParsedChunk, parse_chunk, stage
from kvwire.codec.gpu.streams import Pending, Queue, StreamEvent, current_event
from kvwire.codec.gpu.tiles import tiles_of
from kvwire.codec.workers import map_ahead
from kvwire.errors import KvwireError
from kvwire.types import PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from kvwire.codec.format.header import Header
    from kvwire.codec.format.segment import ChunkSegments
    from kvwire.codec.gpu.tiles import Plan
    from kvwire.codec.prediction.text import TextPredictor
    from kvwire.types import KVCache

WORKSPACE_SHARE = 0.15
"""Device memory for chunks in flight, as a share of the decoded cache, split into two halves. A chunk larger than a
half is decoded alone and takes what it needs."""
LAYER_LAUNCHES = 8
"""Launches that place a batch: after each, more layers are complete."""
_PATIENCE = 1 << 22
"""Polls of about a microsecond before a kernel stops waiting for the level below."""
_HOPPER = 9
_EXACT = 256
"""Whole numbers up to this are exact in bfloat16."""
_OUTPUTS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_WARPS = BLOCK // (64 if torch.version.hip else 32)
"""One lane per thread."""


class DeviceDecoder:
    """Decodes layered chunks of one blob on a GPU, or in Triton's interpreter."""

    def __init__(
        self,
        header: Header,
        text: TextPredictor,
        out: KVCache | PagedKVCache,
        *,
        offset: int | None,
        check: bool = True,
        workspace_bytes: int | None = None,
        finish: Callable[[int, int], bool] | None = None,
    ) -> None:
        """Copy the profile to the device and describe the output."""
        self._header, self._text, self._out = header, text, out
        self._offset, self._check, self._finish = offset, check, finish
        tensors = [tensor for tensor in (*out.keys, *out.values) if tensor.numel()]
        self._device, self._dtype = tensors[0].device, tensors[0].dtype
        self._loaded = on_device(text.profile, self._device)
        self._pages = out.page_table.contiguous() if isinstance(out, PagedKVCache) else None
        self._queues = [Queue(self._device) for _ in range(3)]
        self._copying, self._decoding, self._placing = self._queues
        self._spaces = [Workspace(), Workspace()]
        self._turn = 0
        self._lock = threading.Lock()
        elements = sum(spec.key_width + spec.value_width for spec in header.info.meta.layers if spec.kind != "none")
        decoded = elements * header.info.tokens * self._dtype.itemsize
        workspace = int(WORKSPACE_SHARE * decoded) if workspace_bytes is None else workspace_bytes
        self._room = workspace // len(self._spaces)
        self._tokens_of_block, self._depth = _tile_shape(self._device)
        self._describe(tensors)
        frequencies = [each for regime in header.info.meta.ropes for each in regime.inv_freq]
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32, device=self._device)
        self._last_launch = self._launches_of_layers()
        self._start = current_event(self._device)
        for tensor in (*tensors, *self._inputs()):
            for queue in self._queues[1:]:
                queue.keep(tensor)

    def _inputs(self) -> Iterator[Tensor]:
        """Yield the tensors that kernels read besides batches; their memory must not be reused while kernels run."""
        loaded, own = self._loaded, (self._tile_table, self._frequencies, self._hidden, self._addition, self._pages)
        shared = (loaded.table, loaded.lookup, loaded.thresholds)
        of_groups = chain.from_iterable((g.rows, g.scales, g.mean, g.predictor) for g in loaded.groups)
        return (tensor for tensor in (*own, *shared, *of_groups) if tensor is not None)

    def _describe(self, tensors: list[Tensor]) -> None:
        """Lay out tiles for the groups that the kernel can place, and list the groups that it cannot."""
        simple = self._dtype in _OUTPUTS and all(t.stride(-1) == 1 and t.dtype == self._dtype for t in tensors)
        groups = range(len(self._loaded.groups))
        self._tiled = tuple(g for g in groups if simple and self._loaded.groups[g].rows is not None)
        self._plain = tuple(g for g in groups if g not in self._tiled)
        hidden = self._text.hidden
        self._hidden = None if hidden is None else hidden.to(self._device)
        self._addition: Tensor | None = None
        most = max((len(self._loaded.groups[g].mean) for g in self._tiled), default=0)
        if self._hidden is not None and most:
            chunk = min(self._header.info.tokens, self._header.info.chunk_tokens)
            with torch.inference_mode(mode=False):
                self._addition = torch.empty(chunk * most, dtype=torch.float32, device=self._device)
        launches = LAYER_LAUNCHES if self._addition is None else len(self._tiled)
        self._tiles = tiles_of(
            self._loaded,
            self._out,
            self._header.info.meta,
            self._tiled,
            rotated=self._offset is not None,
            launches=max(1, launches),
            addition=0 if self._addition is None else self._addition.data_ptr(),
        )
        self._tile_table = torch.from_numpy(self._tiles.table).to(self._device)

    def _launches_of_layers(self) -> list[int]:
        """Return the last launch of ``place`` that writes to each layer; -1 where none does."""
        last = [-1] * len(self._header.info.meta.layers)
        for number, plan in enumerate(self._tiles.plans):
            for _, layer in chain.from_iterable(self._loaded.groups[group].planes for group in plan.groups):
                last[layer] = number
        return last

    def batches(self, pieces: Sequence[ChunkSegments]) -> Iterator[DeviceBatch]:
        """Parse chunks in several threads and lay out as many together as the workspace holds."""
        chosen: list[ParsedChunk] = []
        alone = self._addition is not None  # its buffer holds the hidden states' prediction of one chunk
        parsing = map_ahead(self._parse, pieces)
        while True:
            try:
                parsed = next(parsing, None)
            except KvwireError:
                if chosen:
                    yield self._staged(chosen)
                raise
            if chosen and (parsed is None or alone or _bytes([*chosen, parsed]) > self._room):
                yield self._staged(chosen)
                chosen = []
            if parsed is None:
                return
            chosen.append(parsed)

    def _parse(self, piece: ChunkSegments) -> ParsedChunk:
        return parse_chunk(piece, self._header, self._text.profile, check=self._check)

    def _staged(self, chosen: list[ParsedChunk]) -> DeviceBatch:
        return stage(
            chosen,
            self._header,
            rows=self._tokens_of_block,
            origin=self._out.start if isinstance(self._out, PagedKVCache) else 0,
            pinned=self._device.type == "cuda",
        )

    def decode(self, pieces: Sequence[ChunkSegments]) -> Pending:
        """Queue chunks; a GPU goes on working after this returns."""
        return self.load(self.batches(pieces))

    def load(self, batches: Iterable[DeviceBatch]) -> Pending:
        """Queue batches; an iterator may stage them while earlier ones are decoded."""
        with self._lock, torch.autocast(self._device.type, enabled=False):
            flags: list[tuple[Tensor, list[int]]] = []
            layers = [self._start for _ in self._header.info.meta.layers]
            try:
                for staged in batches:
                    chunks = [parsed.piece.chunk for parsed in staged.pieces]
                    flags.append((self._queue(staged, layers), chunks))
            except BaseException:
                for queue in self._queues:  # no work may go on after the error
                    queue.record().wait()
                Pending(self._start, layers, flags).wait()  # an earlier chunk may be damaged as well
                raise
            return Pending(self._placing.record(), layers, flags)

    def _queue(self, staged: DeviceBatch, layers: list[StreamEvent]) -> Tensor:
        """Queue a batch; return its flags, which are on the host once the placing queue is done."""
        self._turn = (self._turn + 1) % len(self._spaces) if _bytes(staged.pieces) <= self._room else 0
        space = self._spaces[self._turn]
        batch = self.upload(staged, space)
        self._decoding.after(self._copying.record())
        with self._decoding.run():
            self.entropy(batch)
        self._placing.after(self._decoding.record())
        with self._placing.run():
            self.place(batch, layers)
            if self._finish is not None:
                wrote = [self._finish(piece.start, piece.start + piece.tokens) for piece in staged.pieces]
                if any(wrote):
                    layers[:] = [self._placing.record()] * len(layers)
            pinned = self._device.type == "cuda"
            flags = torch.empty(len(staged.pieces), dtype=torch.int32, device="cpu", pin_memory=pinned)
            flags.copy_(batch.flags, non_blocking=True)
        space.free = self._placing.record()
        return flags

    def upload(self, staged: DeviceBatch, space: Workspace) -> UploadedBatch:
        """Queue the copy of a batch's bytes for when its workspace is free."""
        for queue in self._queues:
            queue.after(space.free)
        longest = max(piece.tokens for piece in staged.pieces)
        counts = [1 + staged.streams, len(staged.pieces), staged.slots]
        counts += [len(staged.pieces) * len(self._loaded.groups), staged.escaping * longest]
        sizes = [staged.buffer.numel(), staged.values * (4 if staged.wide else 2), *(4 * count for count in counts)]
        with self._copying.run():
            buffer, values, *scratch = space.take(sizes, self._room, self._device, self._queues)
            buffer.copy_(staged.buffer, non_blocking=True)
        parts = [part.view(torch.int32) for part in scratch]
        return UploadedBatch(staged, buffer, values.view(torch.int32 if staged.wide else torch.int16), *parts)

    def entropy(self, batch: UploadedBatch) -> None:
        """Launch the entropy decoding of a batch on the current queue."""
        staged = batch.staged
        for zeroed in (batch.progress, batch.flags, batch.peaks):
            zeroed.zero_()
        if staged.escaping:
            self._streams(batch, staged.base_items)
            tokens = batch.counts.numel() // staged.escaping
            grid = (tokens, staged.escaping)
            escaping, entries = batch.part("escaping"), batch.part("entries")
            decode_kernels.count_escapes[grid](escaping, entries, batch.values, batch.counts, BLOCK=1024)
            words, values, peaks = batch.part("words32"), batch.values, batch.peaks
            decode_kernels.place_escapes[grid](
                escaping, entries, words, values, peaks, batch.counts, batch.flags,
                BLOCK=1024, TOKENS=1 << (tokens - 1).bit_length(),
            )  # fmt: skip
            self._streams(batch, staged.items - staged.base_items)
        else:
            self._streams(batch, staged.items)
        grid = (len(staged.pieces), len(self._loaded.groups))
        slots, chunks = batch.part("group_slots"), batch.part("chunks")
        decode_kernels.last_wide[grid](slots, chunks, batch.peaks, batch.wide, _EXACT, BLOCK=1024)

    def _streams(self, batch: UploadedBatch, items: int) -> None:
        if not items:
            return
        named = [batch.part(name) for name in ("words16", "words32", "entries")]
        decode_kernels.decode_streams[items,](
            batch.part("streams"), batch.part("items"), batch.progress, batch.flags, *named,
            self._loaded.lookup, self._loaded.thresholds, batch.values, batch.peaks, _PATIENCE,
            CHECK=self._check,
            BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip

    def place(self, batch: UploadedBatch, layers: list[StreamEvent] | None = None) -> None:
        """Launch the inverse transform of a batch on the current queue."""
        angles = self._angles(batch)
        for index in self._plain:
            reconstruct_reference(batch, index, self._hidden, self._loaded, self._out, self._header.info.meta, angles)
        self._complete(layers, -1)
        for number, plan in enumerate(self._tiles.plans):
            if self._addition is not None:
                self._predict_from_hidden(batch, plan.groups[0])
            self._launch(batch, plan, angles)
            self._complete(layers, number)

    def _complete(self, layers: list[StreamEvent] | None, number: int) -> None:
        """Record an event for the layers that a launch completes; -1 is the work before the first launch."""
        if layers is not None and number in self._last_launch:
            mark = self._placing.record()
            for layer, last in enumerate(self._last_launch):
                layers[layer] = mark if last == number else layers[layer]

    def _predict_from_hidden(self, batch: UploadedBatch, index: int) -> None:
        """Compute the hidden states' prediction of a group for the batch's only chunk."""
        (piece,) = batch.staged.pieces
        hidden, predictor = cast("Tensor", self._hidden), cast("Tensor", self._loaded.groups[index].predictor)
        part = hidden[piece.start : piece.start + piece.tokens]
        out = cast("Tensor", self._addition)[: piece.tokens * predictor.shape[1]].view(piece.tokens, -1)
        torch.mm(part, predictor[self._loaded.features :].float(), out=out)

    def _launch(self, batch: UploadedBatch, plan: Plan, angles: tuple[Tensor, Tensor]) -> None:
        staged, out = batch.staged, self._out
        page = out.page_tokens if isinstance(out, PagedKVCache) else 0
        named = [batch.part(name) for name in ("chunks", "blocks", "group_slots")]
        texts = [batch.part(name) for name in ("slot_rows", "slot_sizes", "token_ids")]
        table = self._loaded.table if self._loaded.table is not None else batch.buffer.view(torch.int8)
        reconstruct_kernels.place[staged.blocks, plan.tiles](
            self._tile_table, *named, batch.wide, batch.flags, batch.values, *texts, table,
            *angles, self._pages, batch.part("steps"), len(self._loaded.groups), plan.first,
            PAGE=page,
            OUT=_OUTPUTS[self._dtype],
            STRIDE=plan.stride,
            PRECISE=self._dtype != torch.bfloat16,
            ALIGNED=self._tiles.aligned,
            TOKENS=self._tokens_of_block,
            PAIRS=self._tiles.pairs,
            DEPTH=self._depth,
            INTERPRET=interpreted(),
            num_warps=8,
            num_stages=3,
        )  # fmt: skip

    def _angles(self, batch: UploadedBatch) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines ``[tokens, pairs of all regimes]`` of a batch; empty where positions stay off."""
        if self._offset is None or not self._frequencies.numel():
            nothing = torch.empty(0, device=self._device)
            return nothing, nothing
        at = (batch.part("tokens") + self._offset).float()
        angles = at[:, None] * self._frequencies[None, :]
        return angles.cos(), angles.sin()


def _tile_shape(device: torch.device) -> tuple[int, int]:
    """Return tokens and depth of a tile that fit the registers, by the compiler's report."""
    if interpreted():
        return 16, 32
    return 128, 64 if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= _HOPPER else 32


def _bytes(pieces: Sequence[ParsedChunk]) -> int:
    """Count the device bytes of chunks that are decoded together."""
    size = 4 if any(piece.wide for piece in pieces) else 2
    streams = sum(len(data) for piece in pieces for data in piece.piece.segments)
    lists = sum(4 * len(piece.escapes) + 32 * piece.width for piece in pieces)
    return streams + lists + sum(piece.values * size for piece in pieces)
