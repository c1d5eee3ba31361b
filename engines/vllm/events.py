"""What was kept in the store, for whoever listens to vLLM's events of its cache. Imports vLLM.

Of blocks in its own memory, loaded ones included, vLLM tells itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored, KVConnectorKVEvents
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

OWNER = "kvwire"
"""Of a block, as events name the tier that holds it."""


class StoredEvents(KVConnectorKVEvents):
    """Events on their way from a worker to the scheduler, which publishes them."""

    def __init__(self, events: Iterable[KVCacheEvent] = ()) -> None:
        """Hold events."""
        self._events = list(events)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Take more."""
        self._events += events

    def aggregate(self) -> StoredEvents:
        """All of them: each is told by one worker alone."""
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Nothing: see ``aggregate``."""

    def get_all_events(self) -> list[KVCacheEvent]:
        """All of them."""
        return list(self._events)

    def get_number_of_workers(self) -> int:
        """One: see ``aggregate``."""
        return 1

    def clear_events(self) -> None:
        """Forget all."""
        self._events = []


def stored_event(request: Request, block_tokens: int) -> BlockStored | None:
    """What is told once a prompt is in the store."""
    prompt = request.prompt_token_ids or []
    count = len(prompt) // block_tokens
    if not count or len(request.block_hashes) != request.num_tokens // block_tokens:
        return None
    starts = range(0, count * block_tokens, block_tokens)
    extra = [generate_block_hash_extra_keys(request, start, start + block_tokens, 0)[0] for start in starts]
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(each) for each in request.block_hashes[:count]],
        parent_block_hash=None,
        token_ids=list(prompt[: count * block_tokens]),
        block_size=block_tokens,
        lora_id=None,
        medium=MEDIUM_STORAGE,
        lora_name=None,
        extra_keys=to_event_extra_keys(extra),
        locality="REMOTE",
        ownership=OWNER,
    )
