"""``encode`` on the device of the cache: what ``codec.encode`` does on the processor, for many chunks at a time.

Elements, coefficients and symbols stay on the device. The host learns numbers per chunk and level, two bytes a column
for the class lists, the escapes and the words, and packs the segments. From equal quantised values the bytes are those
of the processor. Coefficients differ in their last bits, as sums run in another order, and so may a rare value, by one.

The host waits for the device up to six times a batch: for tokens whose coefficients are too large for bfloat16, for
errors and checks, for the class lists, for escapes if there are any, for the lengths of the lanes, and for the words.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvwire.codec.entropy.tables import LARGEST
from kvwire.codec.format.pack import Coded
from kvwire.codec.gpu.analysis import Transform
from kvwire.codec.gpu.encode_levels import measured, quantised, split_values, squared_errors
from kvwire.codec.gpu.encode_streams import encode_batch
from kvwire.codec.gpu.profile import on_device
from kvwire.codec.transform.analysis import gather_planes
from kvwire.codec.transform.quantiser import quantise

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.gpu.analysis import Span
    from kvwire.codec.prediction.text import TextPredictor
    from kvwire.codec.transform.quantiser import Ladder
    from kvwire.types import KVCache

WORKING_BYTES = 1 << 30
"""Device memory for the working set of a batch of chunks, beside the cache and the profile: enough lanes to keep a GPU
busy. A single chunk that needs more still gets it."""
WORKING_SHARE = 0.15
"""The same as a share of the cache's own bytes, where that is more."""


class DeviceEncoder:
    """Codes the chunks of one cache on its device, in layered levels."""

    def __init__(
        self,
        cache: KVCache,
        text: TextPredictor,
        ladder: Ladder,
        device: torch.device,
        working_bytes: int | None = None,
    ) -> None:
        """Put the profile on the device, unless it is there already."""
        self._device = device
        self._cache, self._text, self._ladder = cache, text, ladder
        self._known = on_device(text.profile, self._device)
        whole = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
        self._room = max(WORKING_BYTES, int(WORKING_SHARE * whole)) if working_bytes is None else working_bytes
        self._transform = Transform(cache, text, self._known, self._ladder.steps[-1])

    def encode(self, spans: Sequence[Span], threads: int | None) -> list[list[Coded]]:
        """Code chunks that follow each other."""
        current: AbstractContextManager[Any] = nullcontext()
        if self._device.type == "cuda":
            current = torch.cuda.device(self._device)
        with current, torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return [coded for batch in self._batches(spans) for coded in self._encode_batch(batch, threads)]

    def _batches(self, spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
        """As many chunks at a time as the working set has room for, at least one."""
        profile, levels = self._text.profile, len(self._ladder.steps)
        # A coefficient has itself and its value, then a symbol and room for a word at each level; four copies of a
        # group's elements come and go. A column of a chunk has its place, class and table at each level.
        a_token = profile.rank * (8 + 3 * levels) + 16 * max(group.width for group in profile.groups)
        a_chunk = (40 * levels + 80) * profile.rank
        longest = max(stop - start for start, stop in spans)
        count = max(1, self._room // (longest * a_token + a_chunk))
        return (spans[first : first + count] for first in range(0, len(spans), count))

    def _encode_batch(self, spans: Sequence[Span], threads: int | None) -> list[list[Coded]]:
        ladder = self._ladder
        bounds = tuple(token - spans[0][0] for token in (*(start for start, _ in spans), spans[-1][1]))
        analysed = self._transform.analyse(spans)
        coefficients = analysed.coefficients
        values, largest = quantised(coefficients, ladder.steps[-1])
        unit, squares = measured(coefficients, bounds)
        batch = split_values(values, unit, bounds, ladder.shifts, self._known)
        missed = squared_errors(coefficients, batch, ladder.steps, self._known)
        energies = torch.stack([squares.sum(1, dtype=torch.float64), analysed.dropped])
        checked = torch.cat([largest[None], analysed.sums]).double()
        found = torch.cat([checked, missed.flatten(), energies.flatten()]).cpu().numpy()  # the host waits
        self._check(spans, coefficients, found[: len(checked)])
        del analysed, coefficients
        errors = found[len(checked) :][: missed.numel()].reshape(missed.shape)
        energy, dropped = found[len(checked) + missed.numel() :].reshape(2, -1)
        elements = np.diff(bounds) * sum(group.width for group in self._text.profile.groups)
        segments = encode_batch(batch, self._known, threads)
        return [
            [
                Coded(*segment, float((error + dropped[chunk]) / elements[chunk]), each_energy)
                for segment, error in zip(segments[chunk], errors[chunk], strict=True)
            ]
            for chunk, each_energy in enumerate(((energy + dropped) / elements).tolist())
        ]

    def _check(self, spans: Sequence[Span], coefficients: Tensor, found: NDArray[np.float64]) -> None:
        """Where numbers look wrong, let the processor find and name what is wrong with them.

        found: the largest size in steps, and a sum of each group's elements, which alone may overflow.
        """
        if not np.isfinite(found[1:]).all():
            for (start, stop), group in itertools.product(spans, self._text.profile.groups):
                gather_planes(self._cache, group.planes, start, stop)
        if not found[0] < LARGEST:
            quantise(coefficients.cpu().numpy(), self._ladder.steps[-1])
