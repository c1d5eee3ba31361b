"""The connector's numbers in vLLM's log and among its Prometheus metrics. Imports vLLM."""

from __future__ import annotations

from collections import Counter as Sums
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from .counting import COUNTED

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class TransferCounts(KVConnectorStats):
    """Sums by name, which add up over steps and workers."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together."""
        return TransferCounts(data=dict(Sums(self.data) + Sums(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """The sums themselves."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class TransferMetrics(KVConnectorPromMetrics):
    """A counter for each name: ``vllm:kvwire_loaded_tokens`` and so on."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the counters."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        made = {
            name: make(name=f"vllm:kvwire_{name}", documentation=told, labelnames=labelnames)
            for name, told in COUNTED.items()
        }
        self._counters = {
            name: create_metric_per_engine(counter, per_engine_labelvalues) for name, counter in made.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what happened since the last time."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
