"""vLLM's connector: its two halves do the work, this hands them what vLLM gives. It and ``metrics`` import vLLM."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache
from vllm.version import __version__ as vllm_version

from kvwire.errors import ArgumentError
from kvwire.store import hash_scheme

from .counting import Counts
from .events import StoredEvents, stored_event
from .layout import check_groups, register_pages
from .metrics import TransferCounts, TransferMetrics
from .opening import ConnectorSettings, check_version, log_as_vllm
from .prefetching import Prefetcher, PrefetchHint
from .proxy.outcome_socket import OutcomeSender
from .requests import PARAMS
from .save_scheduling import PageSave, SaveScheduler
from .saving import PageSaver
from .scheduling import ConnectorScheduler, PageLoad, names_documents, salt_apart
from .working import ConnectorWorker

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent, KVConnectorKVEvents
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .outcomes import LoadOutcome
    from .shards import Shards

_IDLE_S = 1e-3
"""Longest wait of a step that computes nothing: vLLM then does no more than ask whether loads have ended."""


@dataclass
class ConnectorMetadata(KVConnectorMetadata):
    """What the scheduler tells its workers in one step."""

    loads: list[PageLoad] = field(default_factory=list)  # what they begin to load
    saves: list[PageSave] = field(default_factory=list)  # what they copy
    tokens: int = 0  # computed in this step
    hints: list[PrefetchHint] = field(default_factory=list)  # what they fetch ahead


@dataclass
class LoadOutcomes(KVConnectorWorkerMetadata):
    """What workers tell the scheduler of loads that have ended."""

    loads: list[tuple[str, LoadOutcome]]

    def aggregate(self, other: LoadOutcomes) -> LoadOutcomes:
        """Those of both."""
        return LoadOutcomes(self.loads + other.loads)


class KvwireConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads linked documents and stored prefixes into vLLM's pages, for requests that ask for them; keeps prompts."""

    _scheduler: ConnectorScheduler  # these two in the scheduler's process alone
    _save_scheduler: SaveScheduler
    _worker: ConnectorWorker  # in a worker's process alone

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Open the store of the documents; vLLM's ``kv_connector_extra_config`` is read as ``ConnectorSettings``.

        Raises:
            ArgumentError: A setting is wrong, or one of vLLM's that documents need is another.
            NotFoundError: The store has no record of the model.
        """
        log_as_vllm()
        check_version(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        names = ("decode_context_parallel_size", "prefill_context_parallel_size")
        spread = [getattr(parallel, name, 1) for name in names]
        _check(transfer.kv_load_failure_policy, parallel.pipeline_parallel_size, max(spread))
        settings = ConnectorSettings.read(dict(transfer.kv_connector_extra_config))
        check_groups(kv_cache_config, settings.save)
        self._corpus = settings.corpus(vllm_config.model_config.model)
        self._changed = _CHANGED if vllm_config.model_config.hf_overrides else ""
        self._saver: PageSaver | None = None
        self._prefetcher: Prefetcher | None = None
        self._outcome_sender: OutcomeSender | None = None
        self._bad: set[int] = set()
        self._config = vllm_config
        self._step_tokens, self._step_began = 0, 0.0
        self._outcomes: list[tuple[str, LoadOutcome]] = []
        self._events: list[KVCacheEvent] = []
        self._counts, self._disk_errors = Counts(), 0
        self._workers = parallel.tensor_parallel_size
        if role == KVConnectorRole.SCHEDULER:
            block, events = vllm_config.cache_config.block_size, vllm_config.kv_events_config
            self._outcome_sender = OutcomeSender(settings.outcomes) if settings.outcomes else None
            self._block_tokens, self._publishes_events = block, events is not None and events.enable_kv_cache_events
            self._scheduler = ConnectorScheduler(
                self._corpus, patience_s=settings.patience_s, pause_s=settings.pause_s,
                is_strict=transfer.kv_load_failure_policy == "fail", index=settings.index, least_tokens=block,
                link_bound=settings.link_bound,
            )  # fmt: skip
            least = 1 if settings.save == "named" else hash_scheme(settings.index, "").chunk_tokens
            self._save_scheduler = SaveScheduler(settings.save, least, _other_model(vllm_config))
        else:
            loader = settings.loader(self._corpus, vllm_config.model_config.dtype)
            rank = _rank(self._workers)
            self._worker = ConnectorWorker(loader, rank=rank, ranks=self._workers, counts=self._counts)
            self._prefetcher = Prefetcher(self._corpus, self._counts)
            if settings.save != "off":
                self._saver = PageSaver(self._corpus, settings.index, self._counts)

    # The scheduler's process.

    def on_new_request(self, request: Request) -> None:
        """Begin to look up what a request may begin with."""
        prompt, params, name = request.prompt_token_ids, request.kv_transfer_params, request.request_id
        if prompt is None:
            return
        trouble = _why_not_plain(request) or self._changed
        choice = self._scheduler.begin(name, params, prompt, request.cache_salt, trouble)
        if (trouble or choice is None) and names_documents(request.cache_salt):  # they are not loaded
            _set_salt(request, salt_apart(request.cache_salt or "", prompt))
        self._save_scheduler.begin(name, request.cache_salt, choice, trouble)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Promise the tokens of documents or of a prefix, which are then loaded between steps."""
        promised = self._scheduler.promised(request.request_id, num_computed_tokens, request.num_preemptions)
        if promised is not None and (salt := self._scheduler.own_salt(request.request_id)):
            _set_salt(request, salt)
            return None, False  # vLLM looks for blocks under this salt, and asks again
        self._save_scheduler.note_cached(request.request_id, num_computed_tokens)
        return promised, bool(promised)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note where they go."""
        if num_external_tokens:
            self._save_scheduler.note_loaded(request.request_id)
            self._scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand what is to be loaded and kept over to the workers."""
        tokens = scheduler_output.total_num_scheduled_tokens
        return ConnectorMetadata(
            self._scheduler.take(), self._save_scheduler.take(), tokens, self._scheduler.take_hints()
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its answer tells what became of its documents. Pages that are kept are held meanwhile."""
        name, prompt = request.request_id, request.prompt_token_ids or []
        computed = min(request.num_computed_tokens, request.num_tokens - 1)  # the last token's rows are not computed
        saved = self._save_scheduler.end(
            name, prompt, block_ids[0], is_computed=computed >= len(prompt),  # one that was preempted lost its rows
            event=partial(stored_event, request, self._block_tokens) if self._publishes_events else None,
            answer=request.all_token_ids[len(prompt) : max(computed, len(prompt))],
            head=self._scheduler.missing_head(name),
            built_on=lambda had: self._scheduler.built_on(name, had=had),
        )  # fmt: skip
        told = self._scheduler.end(name)
        if told is not None and saved is not None:
            told[PARAMS] |= {"not_saved": saved} if isinstance(saved, str) else {"saving_tokens": saved}
        if told is not None and self._outcome_sender is not None:
            self._outcome_sender.send(request.request_id, told[PARAMS])
        return isinstance(saved, int), told

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what workers tell of loads and of the store."""
        if isinstance(ended := connector_output.kv_connector_worker_meta, LoadOutcomes):
            for request_id, outcome in ended.loads:
                self._scheduler.loaded(request_id, outcome)
        if isinstance(told := connector_output.kv_cache_events, StoredEvents):
            self._events += told.get_all_events()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Have vLLM publish it."""
        events, self._events = self._events, []
        return events

    # A worker's process.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the pages, after a probe of their layout."""
        pages, tables = register_pages(kv_caches, self._kv_cache_config, self._config, self._corpus.meta)
        self._worker.register(pages, self._corpus.meta, tables)
        if self._saver is not None:
            self._saver.register(pages, _shards() if self._workers > 1 else None, tables[0].block_tokens)

    def outcomes(self) -> dict[str, Any]:
        """What became of documents that were saved under names; see ``PageSaver.outcomes``."""
        return self._saver.outcomes() if self._saver is not None else {"under_way": 0, "done": []}

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        self._step_began = time.perf_counter()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Begin the loads of this step, in threads."""
        del forward_context, kwargs
        meta = self._get_connector_metadata()
        if isinstance(meta, ConnectorMetadata):
            self._step_tokens = meta.tokens
            self._worker.start(meta.loads)
            if self._prefetcher is not None:
                self._prefetcher.start(meta.hints)
            if self._saver is not None:
                self._saver.start(meta.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Write what has come, and tell whose loads have ended and whose pages were copied."""
        del finished_req_ids
        self._worker.note_step(self._step_tokens, time.perf_counter() - self._step_began)
        if not self._step_tokens:
            self._worker.wait(_IDLE_S)
        written = self._worker.collect()
        self._outcomes += written.outcomes
        self._bad |= written.bad_blocks
        copied = self._saver.copied() if self._saver is not None else set()
        return KVConnectorTransferResults(copied, set(written.requests), set(written.failed))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What became of loads since the last step."""
        outcomes, self._outcomes = self._outcomes, []
        return LoadOutcomes(outcomes) if outcomes else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM must compute."""
        bad, self._bad = self._bad, set()
        return bad

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """What was put into the store since the last step, where vLLM publishes events."""
        events = self._saver.events() if self._saver is not None else []
        return StoredEvents(events) if events else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was loaded and kept since the last step."""
        counters = getattr(self._corpus.catalog.store, "counters", None)
        if self.role == KVConnectorRole.WORKER and counters is not None:
            errors = counters().disk.write_errors
            self._counts.add(cache_write_errors=errors - self._disk_errors)
            self._disk_errors = errors
        counted = self._counts.take()
        return TransferCounts(data=counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """What another process counted."""
        return TransferCounts(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Counters of what is loaded and kept."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads run between steps."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        """Nothing layer by layer: pages are copied when a request has ended."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: pages are held until they were copied."""

    def shutdown(self) -> None:
        """End threads and connections."""
        is_worker = self.role == KVConnectorRole.WORKER
        for part in (
            self._worker if is_worker else self._scheduler, self._prefetcher, self._saver, self._outcome_sender,
        ):  # fmt: skip
            if part is not None:
                part.close()


_CHANGED = "vLLM serves the model quantised or changed: its rows are not those of the model that the store names"


def _why_not_plain(request: Request) -> str:
    """Why a request's rows are not those of its token ids alone; empty where they are."""
    if request.lora_request is not None:
        return "it has an adapter of its own (LoRA): documents and prefixes are of the model without one"
    if request.mm_features or request.prompt_embeds is not None:
        return "its prompt is more than token ids: documents and prefixes are of token ids alone"
    if request.skip_reading_prefix_cache or getattr(request.sampling_params, "prompt_logprobs", None) is not None:
        return "vLLM computes every token for prompt_logprobs, and loads nothing: leave them out"
    return ""


def _set_salt(request: Request, salt: str) -> None:
    """Have vLLM keep what it computes of a request under a salt of its own."""
    request.cache_salt, request.block_hashes = salt, []
    request.update_block_hashes()


def _other_model(config: VllmConfig) -> str:
    """Why rows that are computed here are not those of the model in the store; empty where they are."""
    model = config.model_config
    own = getattr(model.hf_config, "quantization_config", None)
    if is_quantized_kv_cache(config.cache_config.cache_dtype):
        return "vLLM keeps its rows as fp8, which lose more than what the store promises"
    return _CHANGED if model.hf_overrides or (model.quantization and not own) else ""


def _check(policy: str, stages: int, contexts: int = 1) -> None:
    """Refuse what documents cannot be loaded under."""
    wrong = ""
    if policy not in ("recompute", "fail"):
        wrong = 'set "kv_load_failure_policy" to "recompute", or to "fail": requests without their documents then fail'
    elif stages > 1:
        wrong = "kvwire does not load into the stages of a pipeline yet: serve with --pipeline-parallel-size 1"
    elif contexts > 1:
        wrong = "kvwire does not know tokens that are spread over workers: serve without context parallelism"
    if wrong:
        raise ArgumentError(wrong)


def _rank(workers: int) -> int:
    if workers == 1:
        return 0
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _shards() -> Shards:
    from vllm.distributed import get_tp_group

    from .shards import Shards

    return Shards(get_tp_group().ranks)
