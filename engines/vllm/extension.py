"""What vLLM's workers are asked about documents that are saved under names: ``worker_extension_cls`` names it."""

from __future__ import annotations

from typing import Any


class SavingWorker:
    """A method more for vLLM's workers, which ``collective_rpc`` calls by its name."""

    def kvwire_outcomes(self) -> dict[str, Any]:
        """What became of saved documents since the last call; see ``PageSaver.outcomes``."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        return connector.outcomes()  # type: ignore[no-any-return]
