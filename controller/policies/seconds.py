"""What fetching, decoding and recomputing single chunks takes, as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.policies.base import SLOWEST

if TYPE_CHECKING:
    from kvwire.controller.policies.base import Floats, Ints, PlanRequest


def wire_s(request: PlanRequest, sizes: Ints, bandwidth: float) -> Floats:
    """Seconds for which a fetch of some bytes holds up the next one.

    Args:
        request: What the plan depends on.
        sizes: Bytes, 0 for no fetch ``[...]``.
        bandwidth: Bytes per second.

    Returns:
        Seconds ``[...]``.
    """
    # Requests that share a link end together, and it idles for one time to first byte until the next ones deliver.
    # ``at_once_s`` takes that off again for those that are open together at first.
    return np.where(sizes > 0, sizes / max(bandwidth, SLOWEST) + request.ttfb_s / request.parallel, 0.0)


def at_once_s(request: PlanRequest, count: Ints) -> Floats:
    """Seconds by which the next requests hold the link up less than ``wire_s`` says: it never idles for the first ones.

    Args:
        request: What the plan depends on.
        count: How many requests follow those that are open ``[...]``.

    Returns:
        Seconds ``[...]``.
    """
    free = max(0, request.parallel - len(request.committed.wire))
    return np.minimum(count, free) * (request.ttfb_s / request.parallel)


def decode_s(request: PlanRequest, tokens: Ints, sizes: Ints) -> Floats:
    """Work out how long chunks of some bytes keep a decode lane busy.

    Args:
        request: What the plan depends on.
        tokens: Of each chunk ``[n]``.
        sizes: Bytes, 0 for no fetch ``[..., n]``.

    Returns:
        Seconds, 0 where nothing is fetched ``[..., n]``.
    """
    cost = request.costs.decode
    return np.where(sizes > 0, cost.base_s + cost.token_s * tokens + cost.byte_s * sizes, 0.0)


def last_s(request: PlanRequest, tokens: Ints, sizes: Ints, work: Floats) -> Floats:
    """Work out what decoding a chunk adds where it comes last, so that nothing shares its batch.

    Args:
        request: What the plan depends on.
        tokens: Of each chunk ``[...]``.
        sizes: Bytes, 0 for no fetch ``[...]``.
        work: What ``decode_s`` gives for these ``[...]``.

    Returns:
        Seconds, 0 where nothing is fetched ``[...]``: with one worker those beyond ``decode_s``, for they add to its
        work; with two all of them, for they begin once it is here.
    """
    cost = request.last_decode
    seconds = np.where(sizes > 0, cost.base_s + cost.token_s * tokens + cost.byte_s * sizes, 0.0)
    return seconds if request.workers == 1 else seconds + work


def prefill_s(request: PlanRequest) -> Floats:
    """Seconds of compute of each chunk when it is recomputed ``[n]``.

    A pass's fixed cost falls on a run's first chunk, and where passes are short a share of it on all others.
    """
    chunks, cost = request.chunks, request.costs.prefill
    seconds = cost.token_s * chunks.tokens + cost.pair_s * chunks.pairs
    return seconds + cost.base_s * np.where(chunks.begins, 1.0, 1 / request.pass_chunks)
