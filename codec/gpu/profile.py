"""A profile's arrays on a device, copied on first use."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvwire.codec.profile.group import solve
from kvwire.codec.transform.analysis import variances_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.entropy.tables import Tables
    from kvwire.codec.profile.group import Group
    from kvwire.codec.profile.profile import Profile

FEATURE_ALIGN = 16
"""Token features are padded with zeros to a multiple of this, for 16-byte loads."""
_LOADED: WeakKeyDictionary[Profile, dict[torch.device, DeviceProfile]] = WeakKeyDictionary()
_LOCK = threading.Lock()


class DeviceGroup:
    """A group's matrices on a device; ``planes``, ``width`` and ``rank`` as in the group."""

    def __init__(self, group: Group, features: int, extra: int, device: torch.device) -> None:
        """Take a group; ``extra`` is the padding of ``features``."""
        self.planes, self.width, self.rank = group.planes, group.width, group.rank
        self._group, self._features, self._extra, self._device = group, features, extra, device

    @cached_property
    def mean(self) -> Tensor:
        """Means, float32 ``[width]``."""
        return torch.from_numpy(self._group.mean).to(self._device)

    @cached_property
    def rows(self) -> Tensor | None:
        """Synthesis rows, bfloat16 ``[rank, width]``; None for the identity."""
        rows = self._group.rows
        return None if rows is None else rows.contiguous().to(self._device)

    @cached_property
    def scales(self) -> Tensor | None:
        """Scales of the identity, float32 ``[width]``; None otherwise."""
        scale = self._group.row_scale
        return None if scale is None else torch.from_numpy(scale).to(self._device)

    @cached_property
    def predictor(self) -> Tensor | None:
        """Predictor, bfloat16 ``[features, width]`` with padding; None where the group has none."""
        predictor = self._group.predictor
        if predictor is None:
            return None
        zeros = predictor.new_zeros(self._extra, predictor.shape[1])
        return torch.cat([predictor[: self._features], zeros, predictor[self._features :]]).to(self._device)

    @cached_property
    def analysis(self) -> Tensor:
        """``Group.analysis``, computed on the device; the identity has none."""
        if self._device.type == "cpu":
            return cast("Tensor", self._group.analysis)
        made = solve(cast("Tensor", self.rows).float(), self.metric)
        torch.cuda.synchronize(self._device)  # other threads read it from their own streams
        return made

    def variances(self, step: float) -> Tensor:
        """``variances_of`` on the device."""
        return variances_of(self._group, step).to(self._device)

    @cached_property
    def halved_analysis(self) -> Tensor:
        """``analysis`` in bfloat16."""
        made = self.analysis.bfloat16()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return made

    @cached_property
    def metric(self) -> tuple[Tensor, ...]:
        """``Group.metric``."""
        return tuple(torch.from_numpy(block).to(self._device) for block in self._group.metric)


class DeviceProfile:
    """A profile's arrays on a device; ``features`` includes padding."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        """Take the profile; nothing is copied yet."""
        extra = -profile.token_features % FEATURE_ALIGN
        self.device = device
        self.features = profile.token_features + extra
        self.groups = [DeviceGroup(group, profile.token_features, extra, device) for group in profile.groups]
        self._tables, self._table, self._spread, self._extra = profile.tables, profile.table, profile.spread, extra

    @cached_property
    def table(self) -> Tensor | None:
        """int8 ``[vocabulary, features]``."""
        if self._table is None:
            return None
        return torch.nn.functional.pad(torch.from_numpy(self._table), (0, self._extra)).to(self.device)

    @cached_property
    def lookup(self) -> Tensor:
        """``Tables.lookup``."""
        return torch.from_numpy(self._tables.lookup).to(self.device)

    @cached_property
    def thresholds(self) -> Tensor:
        """``Tables.thresholds``."""
        return torch.from_numpy(self._tables.thresholds).to(self.device)

    @cached_property
    def sizes(self) -> Tensor:
        """``Tables.sizes``."""
        return torch.from_numpy(self._tables.sizes).to(self.device)

    @cached_property
    def packed(self) -> Tensor:
        """``packed_tables``."""
        return torch.from_numpy(packed_tables(self._tables)).to(self.device)

    @cached_property
    def spread(self) -> Tensor:
        """Classes at unit step, int64 ``[rank]``, of all groups' coefficients."""
        return torch.from_numpy(self._spread).to(self.device)

    @property
    def bytes(self) -> int:
        """Bytes of device memory used so far."""
        kept: list[object] = [*vars(self).values(), *(each for group in self.groups for each in vars(group).values())]
        flat = [item for each in kept for item in (each if isinstance(each, tuple) else (each,))]
        on_device = [item for item in flat if isinstance(item, torch.Tensor) and item.device == self.device]
        return sum(tensor.nbytes for tensor in on_device)


def packed_tables(tables: Tables) -> NDArray[np.int32]:
    """Pack starts and frequencies for the encoder's kernel.

    Base symbols of all classes come first, then for each class three contexts of three refinements.
    """
    base = tables.base_starts << np.uint32(16) | tables.base.ravel()
    ternary = tables.ternary_starts << np.uint32(16) | tables.ternary.ravel()
    return np.concatenate([base, ternary]).astype(np.uint32).view(np.int32)


def on_device(profile: Profile, device: torch.device) -> DeviceProfile:
    """Return a profile's arrays on a device; they stay there as long as the profile lives."""
    with _LOCK:
        loaded = _LOADED.setdefault(profile, {})
        if device not in loaded:
            loaded[device] = DeviceProfile(profile, device)
        return loaded[device]
