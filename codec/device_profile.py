"""A profile on a GPU."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.codec.profile import Group, Profile

_LOADED: WeakKeyDictionary[Profile, dict[torch.device, DeviceProfile]] = WeakKeyDictionary()


FEATURE_ALIGN = 16
"""Token features are padded with zeros to multiples of so many: 16-byte loads."""


class DeviceGroup(NamedTuple):
    """A group's matrices on the device: rows bfloat16, None for the identity, which has scales."""

    rows: Tensor | None
    scales: Tensor | None
    mean: Tensor
    predictor: Tensor | None


class DeviceProfile:
    """What decoding needs of a profile, resident on one device."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        """Copy it there."""
        self.tables = profile.tables
        self.lookup = torch.from_numpy(profile.tables.lookup).to(device)
        self.thresholds = torch.from_numpy(profile.tables.thresholds).to(device)
        extra = -profile.token_features % FEATURE_ALIGN
        table = None if profile.table is None else torch.from_numpy(profile.table)
        self.table = None if table is None else torch.nn.functional.pad(table, (0, extra)).to(device)
        self.features = profile.token_features + extra
        self.planes = [group.planes for group in profile.groups]
        self.groups = [_group(group, profile.token_features, extra, device) for group in profile.groups]

    @cached_property
    def bytes(self) -> int:
        """Device memory that it takes."""
        tensors = [self.lookup, self.thresholds, *([] if self.table is None else [self.table])]
        tensors += [tensor for group in self.groups for tensor in group if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)


def _group(group: Group, features: int, extra: int, device: torch.device) -> DeviceGroup:
    """extra: rows of zeros behind the predictor's rows of token features."""
    scales = None if group.row_scale is None else torch.from_numpy(group.row_scale).to(device)
    rows = None if group.rows is None else group.rows.contiguous().to(device)
    predictor = group.predictor
    if predictor is not None:
        zeros = predictor.new_zeros(extra, predictor.shape[1])
        predictor = torch.cat([predictor[:features], zeros, predictor[features:]]).to(device)
    return DeviceGroup(rows, scales, torch.from_numpy(group.mean).to(device), predictor)


def on_device(profile: Profile, device: torch.device) -> DeviceProfile:
    """The profile there: copied at the first call, and freed with the profile."""
    loaded = _LOADED.setdefault(profile, {})
    if device not in loaded:
        loaded[device] = DeviceProfile(profile, device)
    return loaded[device]
