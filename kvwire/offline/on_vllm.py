"""Documents through vLLM on Ray, for models that need several GPUs: ``ray.data.llm`` runs it, kvwire's connector saves.

Each document is one prompt, of which vLLM computes the cache and one token. Its workers put the cache into the store
under the document's name. What the catalog has is left out before, and what it got is read from it afterwards, so that
rows are those of the other ways. Ray only distributes.
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
from kvwire.offline.steps import DocumentSteps, RunOptions, failed_row, told
from kvwire.offline.vllm_stage import OUTCOME, telling
from kvwire.runtime.coding import Document
from kvwire.store.prefix.index import opening_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from kvwire.engines.base import Place, Trust
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import ModelRecord

_STAGE = "vLLMEngineStage"
_OWN = (
    "model", "tensor_parallel_size", "pipeline_parallel_size", "enable_prefix_caching", "kv_transfer_config",
    "worker_extension_cls", "quantization", "hf_overrides", "decode_context_parallel_size",
    "prefill_context_parallel_size", "data_parallel_size",
)  # fmt: skip
_LIGHT_CPUS = 0.1
"""Of what hands rows on beside the model."""
_SPARE_CPUS = 0.5
"""Of the cluster, for all of that: where vLLM takes everything, Ray waits for ever."""
_UNTOLD = "look at the log of vLLM's workers, then run again: what is done is skipped"


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM runs a model.

    Attributes:
        model: Folder of the model, as all machines name it.
        connector: Store, tenant, salt and keys, under the names of the connector's settings.
        tensor_parallel: Workers that share the model; of more than one, each has some of the heads.
        gpus: Of each worker: 1, or 0 for a vLLM that runs on processors.
        dtype: That vLLM computes with, as it names them.
        engine_args: Further arguments of vLLM's engine.
    """

    model: str
    connector: Mapping[str, str] = field(repr=False)  # with its secrets
    tensor_parallel: int = 1
    gpus: float = 1.0
    dtype: str = "auto"
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what kvwire sets itself."""
        if own := sorted(set(self.engine_args) & set(_OWN)):
            raise ArgumentError(
                f"vLLM's argument {own[0]!r} is set by kvwire, or changes what caches hold: leave it out of the "
                "engine's arguments (--tensor-parallel says how many workers share the model)"
            )
        if self.tensor_parallel < 1:
            raise ArgumentError(f"one worker at least runs the model, got {self.tensor_parallel}")

    def engine_kwargs(self) -> dict[str, Any]:
        """Arguments of vLLM: no prompt shares rows with another, and its cache is saved under the name it gives."""
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
        """What Ray sets aside for one worker.

        Args:
            cpus: Processors.
        """
        return {"CPU": cpus} | ({"GPU": self.gpus} if self.gpus else {})


def reading_engine(record: ModelRecord, tokenize: Callable[[str, Place, Trust], list[int]]) -> WeightlessEngine:
    """A model as its store's record and its tokenizer tell it; no weights are opened."""
    refusal = MismatchError(
        "the model runs in vLLM alone here, and only whole documents go there; encode without --engine vllm"
    )
    dtype, digest = getattr(torch, record.meta.dtype), record.model_config_digest
    return WeightlessEngine(record.meta, record.window, dtype, refusal, model_config_digest=digest, tokenize=tokenize)


def encode_on_vllm(
    open_corpus: Callable[[], Corpus],
    refs: Sequence[DocumentRef],
    vllm: VllmSettings,
    options: RunOptions | None = None,
    settings: RaySettings | None = None,
) -> Generator[Row]:
    """Encode documents with a model that vLLM runs on Ray.

    The store has the model's record and profile already: these are made where the model is opened with transformers,
    from a few documents. What several documents have in common is computed for each.

    Args:
        open_corpus: Opens store and tokenizer, as a corpus with a ``reading_engine``; called in actors, so it is to be
            picklable, and its store is one that all machines reach.
        refs: The documents.
        vllm: How vLLM runs the model.
        options: What is encoded; nothing is forced, and no profile is fitted.
        settings: How work is spread: ``actors`` are vLLMs, ``cpus`` of each worker; GPUs are those of ``vllm``.

    Yields:
        A row for each document, in the order given. ``prefill_s`` is from the first step of the model to the first
        token, ``encode_s`` includes writing.

    Raises:
        ArgumentError: Ray or vLLM is not installed, the cluster is too small, or an option is none that vLLM serves.
        NotFoundError: The store has no profile.
        KvwireError: The corpus cannot be opened, or vLLM cannot run.
    """
    chosen, spread = options or RunOptions(), settings or RaySettings()
    if chosen.force or chosen.refit:
        msg = "with vLLM nothing is forced and no profile is fitted; encode without --engine vllm for that"
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
    """Ray's processor, whose stage of vLLM tells what became of each document."""
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
    except ValueError as error:  # of pydantic
        words = error.errors(include_input=False) if hasattr(error, "errors") else error  # inputs hold secrets
        raise ArgumentError(f"Ray refuses these settings of vLLM: {words}") from error
    light = {"num_cpus": _LIGHT_CPUS}
    processor = build_processor(config, _request, preprocess_map_kwargs=light, postprocess_map_kwargs=light)
    stage = processor.stages[_STAGE]
    processor.stages[_STAGE] = stage.model_copy(update={"fn": telling(stage.fn)})
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
        rows = rows_of(saved.map_batches(Teller, **given, num_cpus=_LIGHT_CPUS))
    for batch in read.select_columns(["row", "is_due"]).iter_batches(batch_size=None, prefetch_batches=0):
        for row, is_due in zip(batch["row"], batch["is_due"], strict=True):
            yield next(rows) if is_due else Row.from_dict(json.loads(row))


def _is_due(row: Mapping[str, Any]) -> bool:
    return bool(row["is_due"])


def _request(row: dict[str, Any]) -> dict[str, Any]:
    """A document as Ray's stage of vLLM takes it: its cache, and one token that is not read."""
    name = json.loads(row["row"])["id"]
    params = {
        "max_tokens": 1, "temperature": 0.0, "detokenize": False,
        "extra_args": {"kv_transfer_params": {"kvwire": {"save": name}}},
    }  # fmt: skip
    return {"row": row["row"], "ids": row["ids"], "tokenized_prompt": _ids(row["ids"]), "sampling_params": params}


def _ids(data: bytes) -> list[int]:
    return array("q", data).tolist()


def _profile(corpus: Corpus) -> str:
    """Digest of the profile that the connector will encode with."""
    if corpus.profile() is None or (found := corpus.encoder().prepare(list)) is None:
        raise NotFoundError(
            "the store has no profile of this model, and vLLM fits none: encode a few documents into it without "
            "--engine vllm first (a model that fits no GPU runs on the processor, or over several with "
            "kvwire.open_engine(model, device_map='auto'))"
        )
    return found.digest


def _most_engines(nodes: Sequence[Mapping[str, Any]], vllm: VllmSettings, cpus: float) -> int:
    """How many vLLMs the cluster has room for, each on one machine."""
    needs = {name: each * vllm.tensor_parallel for name, each in vllm.bundle(cpus).items() if each}
    alive = [node["Resources"] for node in nodes if node.get("Alive", True)]
    fitting = sum(min((int(has.get(name, 0) // each) for name, each in needs.items()), default=1) for has in alive)
    spared = sum(has.get("CPU", 0) for has in alive) - _SPARE_CPUS
    return min(fitting, int(spared // needs["CPU"])) if "CPU" in needs else fitting


def _check_room(nodes: Sequence[Mapping[str, Any]], vllm: VllmSettings, cpus: float) -> None:
    """Refuse what Ray would wait for, for ever."""
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
    """An actor beside the model: it opens the store, and says of each document where it cannot."""

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
    """What an actor runs before the model: documents are read, tokenised and looked up."""

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
        """Read documents."""
        rows, ids = [], []
        for line in batch["ref"]:
            ref = DocumentRef.from_json(str(line))
            row, found = self._read(ref) if self._error is None else (failed_row(_row(ref), self._error), None)
            rows.append(row.to_json())
            ids.append(found)
        return {"row": rows, "is_due": [each is not None for each in ids], "ids": [each or b"" for each in ids]}

    def _read(self, ref: DocumentRef) -> tuple[Row, bytes | None]:
        work = self._steps.front(self._steps.begin(ref))
        if work.is_done or work.document is None:
            return work.row, None
        self._steps.leave(work)
        return work.row, array("q", work.document.token_ids).tobytes()


class Teller(_Member):
    """What an actor runs behind the model: it reads from the catalog what became of documents."""

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Tell."""
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
            raise StorageError(f"vLLM's worker has saved it, and the store has not got it; {_UNTOLD}")
        for each in self._indexes:
            each.add(found.entry, ids, is_new=True, opening=opening_of(found.info))
        return told(row, replace(found, skipped=False))


def error_of(kind: str, message: str) -> KvwireError:
    """The error that a worker met."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, KvwireError):
        return found(message)
    return KvwireError(f"{message.replace('; ', ', ')}; {_UNTOLD}")


def _row(ref: DocumentRef) -> Row:
    return Row(ref.document_id, ref.source)
