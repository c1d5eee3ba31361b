"""What a worker did since the last look: numbers for vLLM's own metrics."""

from __future__ import annotations

import threading
from collections import Counter

COUNTED = {
    "loads": "Loads of documents or prefixes that have ended.",
    "loaded_tokens": "Tokens whose rows were loaded into pages.",
    "lost_tokens": "Tokens that were promised and are computed: damaged, lost or late.",
    "loaded_bytes": "Bytes received for loads.",
    "saved_prompts": "Prompts that were kept in the store.",
    "saved_tokens": "Tokens of these.",
    "saved_bytes": "Bytes of their blobs.",
    "unsaved_prompts": "Prompts that were to be kept and could not be.",
    "soon_documents": "Documents that were fetched ahead.",
    "cache_write_errors": "Times that the disk of the cache failed to take something in.",
    "soon_dropped": "Documents that were to be fetched ahead and were not: lost, too many, or loads left no time.",
}
"""Names, with what they count."""


class Counts:
    """Sums since they were last taken. Any thread may add."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, **numbers: int) -> None:
        """Add to sums."""
        with self._lock:
            self._sums.update(numbers)

    def take(self) -> dict[str, int]:
        """The sums since the last call; those that are 0 are left out."""
        with self._lock:
            sums, self._sums = self._sums, Counter()
        return {name: count for name, count in sums.items() if count}
