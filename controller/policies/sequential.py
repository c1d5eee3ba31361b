"""Writing down a plan whose levels are chosen already, for policies that look no further."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..forecast import decode_s, prefill_s, wire_s
from ..snapshot import RECOMPUTE, SLOWEST, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..snapshot import Ints, PlanRequest


def sequential_plan(request: PlanRequest, levels: Ints, order: Sequence[int], reason: str) -> Plan:
    """Write down a plan of these levels."""
    chunks, committed = request.chunks, request.committed
    sizes = chunks.bytes_at(levels)
    bandwidth = max(request.bandwidth, SLOWEST)
    link = request.lead_s + (float(committed.wire.sum()) + committed.ahead_bytes) / bandwidth
    fetched = np.flatnonzero(sizes)
    link += float(wire_s(sizes, bandwidth).sum())
    work = decode_s(request, chunks.tokens, sizes)
    decoding = committed.decode_s + float(committed.work_s.sum() + work.sum())
    computing = committed.prefill_s + float(np.sum(prefill_s(request)[levels == RECOMPUTE])) if chunks.count else 0.0
    compute = decoding + computing if request.workers == 1 else max(decoding, computing)
    finish_s = max(link if len(fetched) else 0.0, compute) + request.costs.closing_s(request.prompt_tokens)
    tokens = max(int(chunks.tokens.sum()), 1)
    return Plan(
        levels=levels,
        order=order,
        finish_s=finish_s,
        error=float((chunks.tokens * chunks.errors_at(levels)).sum()) / tokens,
        bytes=int(sizes.sum()),
        in_time=request.left_s is None or finish_s <= request.left_s,
        reason=reason,
    )
