"""vLLM's connector: its two halves do the work, this hands them what vLLM gives. The only module that imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.model_executor.models.utils import extract_layer_index

from kvwire.engines.vllm import PackedPages, StridedPages
from kvwire.errors import ArgumentError, MismatchError
from kvwire.vllm.opening import ConnectorSettings
from kvwire.vllm.scheduling import PageLoad, Scheduling
from kvwire.vllm.working import Working

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvwire.engines.vllm import Pages


@dataclass
class PageLoads(KVConnectorMetadata):
    """What the scheduler tells its workers in one step."""

    loads: list[PageLoad] = field(default_factory=list)


class KvwireConnector(KVConnectorBase_V1):
    """Loads linked documents into vLLM's pages, for requests that name them."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Open the store of the documents.

        Args:
            vllm_config: vLLM's; ``kv_connector_extra_config`` is read as ``ConnectorSettings``.
            role: The scheduler's half or a worker's.
            kv_cache_config: Of the pages.

        Raises:
            ArgumentError: A setting is wrong, or one of vLLM's that documents need is another.
            NotFoundError: The store has no record of the model.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        _check(transfer.kv_load_failure_policy, len(kv_cache_config.kv_cache_groups), parallel.pipeline_parallel_size)
        settings = ConnectorSettings.read(dict(transfer.kv_connector_extra_config))
        self._corpus = settings.corpus(vllm_config.model_config.model)
        self._scheduling: Scheduling | None = None
        self._working: Working | None = None
        self._bad: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduling = Scheduling(self._corpus, patience_s=settings.patience_s)
        else:
            loader = settings.loader(self._corpus, vllm_config.model_config.dtype)
            self._working = Working(loader, rank=_rank(parallel.tensor_parallel_size))

    @property
    def scheduling(self) -> Scheduling:
        """The scheduler's half."""
        if self._scheduling is None:
            raise _other_half()
        return self._scheduling

    @property
    def working(self) -> Working:
        """A worker's half."""
        if self._working is None:
            raise _other_half()
        return self._working

    # The scheduler's process.

    def on_new_request(self, request: Request) -> None:
        """Begin to look a request's documents up."""
        prompt = request.prompt_token_ids
        if prompt is not None:
            self.scheduling.begin(request.request_id, request.kv_transfer_params, prompt, request.cache_salt)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Promise the documents' tokens, which are then loaded between steps."""
        promised = self.scheduling.promised(request.request_id, num_computed_tokens, request.num_preemptions)
        return promised, bool(promised)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note where they go."""
        if num_external_tokens:
            self.scheduling.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand the loads of this step over to the workers."""
        del scheduler_output
        return PageLoads(self.scheduling.take())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its answer tells what became of its documents."""
        del block_ids
        return False, self.scheduling.end(request.request_id)

    # A worker's process.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the pages, after a probe of their layout."""
        named = sorted(kv_caches.items(), key=lambda item: extract_layer_index(item[0]))
        self.working.register(_pages([view for _, view in named], self._corpus), self._corpus.meta)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Begin the loads of this step, in threads."""
        del forward_context, kwargs
        meta = self._get_connector_metadata()
        if isinstance(meta, PageLoads):
            self.working.start(meta.loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Write what has come, and tell whose loads have ended."""
        del finished_req_ids
        written = self.working.collect()
        self._bad |= written.bad_blocks
        return None, set(written.requests) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM must compute."""
        bad, self._bad = self._bad, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads run between steps."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def shutdown(self) -> None:
        """End threads and connections."""
        if self._working is not None:
            self._working.close()
        if self._scheduling is not None:
            self._scheduling.close()


def _check(policy: str, groups: int, stages: int) -> None:
    """Refuse what documents cannot be loaded under."""
    wrong = ""
    if policy != "recompute":
        wrong = 'set "kv_load_failure_policy": "recompute": what does not come in time is computed, not an error'
    elif groups > 1:
        wrong = (
            "the model's pages are in several groups, which kvwire does not load into yet: serve it without documents"
        )
    elif stages > 1:
        wrong = "kvwire does not load into the stages of a pipeline yet: serve with --pipeline-parallel-size 1"
    if wrong:
        raise ArgumentError(wrong)


def _rank(workers: int) -> int:
    if workers == 1:
        return 0
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _pages(views: list[Tensor], corpus: Any) -> Pages:  # noqa: ANN401 - a Corpus
    """Whatever writes into these: vLLM's own kernel on a processor, strides elsewhere."""
    dims = [spec.key_dim for spec in corpus.meta.layers]
    if len(dims) != len(views):
        msg = f"vLLM has pages of {len(views)} layers, the documents are of {len(dims)}: name their model"
        raise MismatchError(msg)
    if views[0].device.type != "cpu":
        return StridedPages(views, dims)
    return PackedPages(views, dims, _cpu_kernel)


def _cpu_kernel(view: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write as vLLM does on a processor."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    blocks, heads, tokens, width = view.shape
    key_pages, value_pages = view.view(blocks, heads, tokens * 2, width // 2).chunk(2, dim=2)
    isa = _get_attn_isa(view.dtype, tokens, width // 2)
    cpu_attn_reshape_and_cache(keys, values, key_pages, value_pages, slots, isa)


def _other_half() -> ArgumentError:
    return ArgumentError("this is the other half of the connector: vLLM asked the wrong one; report this")
