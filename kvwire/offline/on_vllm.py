"""Encoding with vLLM on Ray, for models on several GPUs: ``ray.data.llm`` runs it, kvwire's connector saves.

Each document is a prompt; vLLM computes its cache and one token, and its workers store the cache under the document's
name. A look-up in the catalog before leaves out finished documents, one afterwards makes the same rows as other
engines. Ray only distributes.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from kvwire import errors
from kvwire._lazy import require
from kvwire.engines.weightless import WeightlessEngine
from kvwire.errors import ArgumentError, KvwireError, MismatchError, NotFoundError, StorageError
from kvwire.offline.manifest import Row
from kvwire.offline.on_ray import RaySettings, dataset_of, rows_of, start_ray
from kvwire.offline.refs import DocumentRef
from kvwire.offline.steps import DocumentSteps, RunOptions, failed_row, stored_row
from kvwire.offline.vllm_stage import OUTCOME, with_outcomes
from kvwire.runtime.coding import Document
from kvwire.runtime.prefill import opening_of as opening_before
from kvwire.store.prefix.index import opening_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from kvwire.engines.texts import Place, Trust
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import ModelRecord

_STAGE = "vLLMEngineStage"
_OWN = (
    "model", "tensor_parallel_size", "pipeline_parallel_size", "enable_prefix_caching", "kv_transfer_config",
    "worker_extension_cls", "quantization", "hf_overrides", "decode_context_parallel_size",
    "prefill_context_parallel_size", "data_parallel_size",
)  # fmt: skip
_LIGHT_CPUS = 0.1
"""CPUs of the actors that only pass rows on."""
_SPARE_CPUS = 0.5
"""CPUs kept free for them: if vLLM takes all, Ray waits for ever."""
_UNTOLD = "look at the log of vLLM's workers, then run again: finished documents are skipped"


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM runs a model.

    Attributes:
        model: Folder of the model on all machines.
        connector: Store, tenant, salt and keys, by the connector's names of settings.
        tensor_parallel: Workers that share the model, and so its heads.
        gpus: GPUs per worker: 1, or 0 for vLLM on processors.
        dtype: vLLM's name of the computing dtype.
        engine_args: Further arguments for vLLM's engine.
    """

    model: str
    connector: Mapping[str, str] = field(repr=False)  # holds secrets
    tensor_parallel: int = 1
    gpus: float = 1.0
    dtype: str = "auto"
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse arguments that kvwire sets."""
        if own := sorted(set(self.engine_args) & set(_OWN)):
            raise ArgumentError(
                f"vLLM's argument {own[0]!r} is set by kvwire, or changes what caches hold: leave it out of the "
                "engine's arguments (--tensor-parallel says how many workers share the model)"
            )
        if self.tensor_parallel < 1:
            raise ArgumentError(f"at least one worker runs the model, got {self.tensor_parallel}")

    def engine_kwargs(self) -> dict[str, Any]:
        """Arguments for vLLM: no prefix sharing, and caches saved under the prompt's name."""
        spread = {"distributed_executor_backend": "mp"} if self.tensor_parallel > 1 else {}
        transfer = {
            "kv_connector": "KvwireConnector", "kv_connector_module_path": "kvwire.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**self.connector, "save": "named"},
        }  # fmt: skip
        return {
            **spread, "dtype": self.dtype, "skip_tokenizer_init": True, **self.engine_args,
            "tensor_parallel_size": self.tensor_parallel, "enable_prefix_caching": False,
            "kv_transfer_config": transfer, "worker_extension_cls": "kvwire.vllm.SavingWorker",
        }  # fmt: skip

    def bundle(self, cpus: float) -> dict[str, float]:
        """Ray's resources for one worker.

        Args:
            cpus: Processors.
        """
        return {"CPU": cpus} | ({"GPU": self.gpus} if self.gpus else {})


def reading_engine(
    record: ModelRecord,
    tokenize: Callable[[str, Place, Trust], list[int]],
    opening: Sequence[int],
    vocabulary_size: int,
) -> WeightlessEngine:  # fmt: skip
    """A model from its stored record and its tokenizer, without weights."""
    refusal = MismatchError(
        "the model runs only in vLLM here, which takes whole documents; encode without --engine vllm"
    )
    dtype, digest = getattr(torch, record.meta.dtype), record.model_config_digest
    return WeightlessEngine(
        record.meta, record.window, dtype, refusal, model_config_digest=digest, tokenize=tokenize,
        opening=opening, vocabulary_size=vocabulary_size,
    )  # fmt: skip


def encode_on_vllm(
    open_corpus: Callable[[], Corpus],
    refs: Sequence[DocumentRef],
    vllm: VllmSettings,
    options: RunOptions | None = None,
    settings: RaySettings | None = None,
) -> Generator[Row]:
    """Encode documents with vLLM on Ray.

    The store must already have the model's record and profile: encode a few documents with transformers first. Prefixes
    that documents share are computed for each.

    Args:
        open_corpus: Opens store and tokenizer, as a corpus with a ``reading_engine``, in actors, so it must be
            picklable, and all machines must reach the store.
        refs: The documents.
        vllm: vLLM's settings.
        options: Encoding options; force, refit and profile are refused.
        settings: Distribution: ``actors`` are vLLMs, ``cpus`` per worker; GPUs come from ``vllm``.

    Yields:
        One row per document, in the order given. ``prefill_s`` is from the first step of the model to the first token,
        ``encode_s`` includes writing.

    Raises:
        ArgumentError: Ray or vLLM is missing, the cluster is too small, or an option is not supported.
        NotFoundError: The store has no profile.
        KvwireError: The corpus cannot be opened, or vLLM cannot run.
    """
    chosen, spread = options or RunOptions(), settings or RaySettings()
    if chosen.force or chosen.refit:
        msg = "vLLM supports neither --force nor fitting a profile; encode without --engine vllm for that"
        raise ArgumentError(msg)
    require("ray", "ray", "--engine vllm")
    if find_spec("vllm") is None:
        raise ArgumentError("--engine vllm needs vLLM on all machines: pip install 'kvwire[vllm]'")
    profile = _profile(open_corpus())
    start_ray(spread)
    import ray
    import ray.data

    _check_room(ray.nodes(), vllm, spread.cpus)
    made_of = (open_corpus, profile, chosen)
    try:
        yield from _rows([ref.to_json() for ref in refs], made_of, vllm, spread)
    except ray.exceptions.RayError as error:
        words = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
        raise KvwireError(
            f"vLLM did not run on Ray ({words[-1][-300:]}); the logs of Ray's workers say why, on their "
            "machine in ray/session_latest/logs"
        ) from error


def processor_of(vllm: VllmSettings, spread: RaySettings, engines: int) -> Any:  # noqa: ANN401 - Ray's
    """Ray's processor, with a vLLM stage that reports each document's outcome."""
    try:
        from ray.data.llm import build_processor, vLLMEngineProcessorConfig
    except ImportError as error:
        msg = f"--engine vllm needs ray.data.llm of Ray 2.60 or later ({error}): pip install -U 'ray[data]'"
        raise ArgumentError(msg) from error
    try:
        config = vLLMEngineProcessorConfig(
            model_source=vllm.model, engine_kwargs=vllm.engine_kwargs(), concurrency=(engines, engines),
            batch_size=spread.batch, chat_template_stage=False, tokenize_stage=False, detokenize_stage=False,
            placement_group_config={"bundles": [vllm.bundle(spread.cpus)] * vllm.tensor_parallel},
            should_continue_on_error=True, log_engine_metrics=False,
        )  # fmt: skip
    except ValueError as error:  # pydantic's
        words = error.errors(include_input=False) if hasattr(error, "errors") else error  # inputs hold secrets
        raise ArgumentError(f"Ray refuses these settings of vLLM: {words}") from error
    light = {"num_cpus": _LIGHT_CPUS}
    processor = build_processor(config, _request, preprocess_map_kwargs=light, postprocess_map_kwargs=light)
    stage = processor.stages[_STAGE]
    processor.stages[_STAGE] = stage.model_copy(update={"fn": with_outcomes(stage.fn)})
    return processor


def _rows(lines: list[str], made_of: tuple[Any, ...], vllm: VllmSettings, spread: RaySettings) -> Generator[Row]:
    import ray.data

    data = dataset_of(lines, spread)
    one = ray.data.ActorPoolStrategy(size=1)
    given: dict[str, Any] = {"fn_constructor_args": made_of, "batch_size": spread.batch, "compute": one}
    read = data.map_batches(Reader, **given, num_cpus=spread.cpus).materialize()
    due = read.filter(_is_due, num_cpus=_LIGHT_CPUS).materialize()
    rows: Iterator[Row] = iter(())
    if count := due.count():
        most = _most_engines(ray.nodes(), vllm, spread.cpus) or spread.actors or 1  # 0: each is over several machines
        engines = max(1, min(spread.actors or most, most, -(-count // spread.batch)))
        saved = processor_of(vllm, spread, engines)(due)
        rows = rows_of(saved.map_batches(OutcomeReader, **given, num_cpus=_LIGHT_CPUS))
    for batch in read.select_columns(["row", "is_due"]).iter_batches(batch_size=None, prefetch_batches=0):
        for row, is_due in zip(batch["row"], batch["is_due"], strict=True):
            yield next(rows) if is_due else Row.from_dict(json.loads(row))


def _is_due(row: Mapping[str, Any]) -> bool:
    return bool(row["is_due"])


def _request(row: dict[str, Any]) -> dict[str, Any]:
    """A document as a request of Ray's vLLM stage: save its cache, generate one token."""
    name, head = json.loads(row["row"])["id"], _ids(row["head"])
    save = {"save": name} | ({"head": len(head)} if head else {})
    params = {
        "max_tokens": 1, "temperature": 0.0, "detokenize": False,
        "extra_args": {"kv_transfer_params": {"kvwire": save}},
    }  # fmt: skip
    prompt = [*head, *_ids(row["ids"])]
    return {"row": row["row"], "ids": row["ids"], "tokenized_prompt": prompt, "sampling_params": params}


def _ids(data: bytes) -> list[int]:
    return array("q", data).tolist()


def _profile(corpus: Corpus) -> str:
    """Digest of the connector's profile."""
    if corpus.profile() is None or (found := corpus.encoder().prepare(list)) is None:
        raise NotFoundError(
            "the store has no profile of this model, and vLLM fits none: encode a few documents into it without "
            "--engine vllm first (a model that fits no GPU runs on the processor, or over several with "
            "kvwire.open_engine(model, device_map='auto'))"
        )
    return found.digest


def _most_engines(nodes: Sequence[Mapping[str, Any]], vllm: VllmSettings, cpus: float) -> int:
    """Number of vLLMs that fit the cluster, each on one machine."""
    needs = {name: each * vllm.tensor_parallel for name, each in vllm.bundle(cpus).items() if each}
    alive = [node["Resources"] for node in nodes if node.get("Alive", True)]
    fitting = sum(min((int(has.get(name, 0) // each) for name, each in needs.items()), default=1) for has in alive)
    spared = sum(has.get("CPU", 0) for has in alive) - _SPARE_CPUS
    return min(fitting, int(spared // needs["CPU"])) if "CPU" in needs else fitting


def _check_room(nodes: Sequence[Mapping[str, Any]], vllm: VllmSettings, cpus: float) -> None:
    """Refuse requirements that Ray would wait for without end."""
    is_spread = vllm.engine_args.get("distributed_executor_backend") == "ray"
    if is_spread or _most_engines(nodes, vllm, cpus) > 0:
        return
    each = vllm.bundle(cpus)
    needs = " and ".join(f"{each[name] * vllm.tensor_parallel:g} {name}s" for name in each)
    has = "; ".join(", ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in each) for node in nodes)
    raise ArgumentError(
        f"a vLLM of {vllm.tensor_parallel} workers needs one machine with {needs}, and Ray {_SPARE_CPUS:g} CPUs "
        f"more; Ray has {has}: name a larger cluster (RAY_ADDRESS), take fewer workers, or less than {cpus:g} --cpus "
        "for each; --device cpu is for a vLLM that runs on processors"
    )


class _Member:
    """An actor next to the model, with a store; if that does not open, its error goes to every document."""

    def __init__(self, open_corpus: Callable[[], Corpus], profile: str, options: RunOptions) -> None:
        """Open store and tokenizer."""
        self._error: KvwireError | None = None
        try:
            self._corpus = open_corpus()
            self._profile = self._corpus.profile(profile)
            self._encoder = self._corpus.encoder()
            self._indexes = self._encoder.indexes(options.index)
            self._steps = DocumentSteps(self._corpus, self._profile, options)
        except KvwireError as error:
            self._error = error


class Reader(_Member):
    """First actor: reads, tokenises and looks up documents."""

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
        """Read documents."""
        rows, ids = [], list[tuple[bytes, bytes] | None]()
        for line in batch["ref"]:
            ref = DocumentRef.from_json(str(line))
            row, found = self._read(ref) if self._error is None else (failed_row(_row(ref), self._error), None)
            rows.append(row.to_json())
            ids.append(found)
        heads, texts = ([each[side] if each else b"" for each in ids] for side in (0, 1))
        return {"row": rows, "is_due": [each is not None for each in ids], "head": heads, "ids": texts}

    def _read(self, ref: DocumentRef) -> tuple[Row, tuple[bytes, bytes] | None]:
        """A row, and, where the document is to be computed, what stands before it, BOS, and its tokens."""
        work = self._steps.front(self._steps.begin(ref))
        if work.is_done or work.document is None:
            return work.row, None
        self._steps.leave(work)
        ids = work.document.token_ids
        head = opening_before(self._encoder.engine, ids)
        return work.row, (array("q", head).tobytes(), array("q", ids).tobytes())


class OutcomeReader(_Member):
    """Last actor: reads each document's outcome from the catalog."""

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Make the rows."""
        rows = []
        for line, ids, outcome in zip(batch["row"], batch["ids"], batch[OUTCOME], strict=True):
            row, said = Row.from_dict(json.loads(line)), json.loads(outcome)
            row = replace(row, prefill_s=said["prefill_s"], encode_s=said["encode_s"])
            try:
                rows.append(self._told(row, tuple(_ids(ids)), said))
            except KvwireError as error:
                rows.append(failed_row(row, error))
        return {"row": [row.to_json() for row in rows]}

    def _told(self, row: Row, ids: tuple[int, ...], said: Mapping[str, Any]) -> Row:
        if self._error is not None:
            raise self._error
        if said["message"]:
            raise error_of(said["error"], said["message"])
        found = self._encoder.known(Document(row.id, ids), self._profile)
        if found is None:
            raise StorageError(f"vLLM's worker saved it, but the store does not have it; {_UNTOLD}")
        for each in self._indexes:
            each.add(found.entry, ids, is_new=True, opening=opening_of(found.info))
        return stored_row(row, replace(found, skipped=False))


def error_of(kind: str, message: str) -> KvwireError:
    """A worker's error, from its type's name."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, KvwireError):
        return found(message)
    return KvwireError(f"{message.replace('; ', ', ')}; {_UNTOLD}")


def _row(ref: DocumentRef) -> Row:
    return Row(ref.document_id, ref.source)
