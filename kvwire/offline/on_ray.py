"""Encoding on many machines: Ray hands documents to actors, each with an engine, the profile and the store.

Ray only distributes. The catalog records each finished document, so work that Ray repeats is skipped there. Blobs are
named by their content: if two actors encode a document, they write the same blob.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvwire import errors
from kvwire._lazy import require
from kvwire.errors import KvwireError, MismatchError
from kvwire.offline.manifest import Row
from kvwire.offline.pipeline import encode_side_by_side, prepare_profile
from kvwire.offline.refs import DocumentRef
from kvwire.offline.steps import Batches, RunOptions, failed_row

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from kvwire.runtime.corpus import Corpus


_MOST_BLOCKS = 4096
"""Limit of Ray's blocks; with more documents, a block holds several batches."""


@dataclass(frozen=True)
class RaySettings:
    """Distribution of the work.

    Attributes:
        actors: Processes with an engine each; 0: as many as the cluster has GPUs, or processors, for.
        gpus: GPUs per actor; fractions are allowed.
        cpus: CPUs per actor.
        batch: Documents that an actor takes at once; a killed actor loses no more.
        address: Address of a cluster; None: from RAY_ADDRESS, or a cluster on this machine.
    """

    actors: int = 0
    gpus: float = 0.0
    cpus: float = 1.0
    batch: int = 32
    address: str | None = None


def encode_on_ray(
    open_corpus: Callable[[], Corpus],
    refs: Sequence[DocumentRef],
    options: RunOptions | None = None,
    settings: RaySettings | None = None,
) -> Generator[Row]:
    """Encode documents with Ray.

    The profile is found or fitted once, by one process, and stored before encoding starts.

    Args:
        open_corpus: Opens engine and store in every actor, so it must be picklable, and all machines must reach the
            store.
        refs: The documents; all machines must read them under these names.
        options: Encoding options.
        settings: Distribution of the work.

    Yields:
        One row per document, in the order given.

    Raises:
        ArgumentError: Ray is not installed.
        KvwireError: The corpus cannot be opened, or there is no profile.
    """
    require("ray", "ray", "--on ray")
    import ray
    import ray.data

    chosen, spread = options or RunOptions(), settings or RaySettings()
    start_ray(spread)
    lines = [ref.to_json() for ref in refs]
    needs: dict[str, Any] = {"num_cpus": spread.cpus, "num_gpus": spread.gpus}
    fitted = ray.get(ray.remote(**needs)(_prepare).remote(open_corpus, ray.put(lines), chosen))
    if "error" in fitted:
        raise getattr(errors, fitted["error"])(fitted["message"])
    data = dataset_of(lines, spread)
    actors = min(spread.actors or _most_actors(ray.cluster_resources(), spread), data.num_blocks())
    pool, made_of = ray.data.ActorPoolStrategy(size=actors), (open_corpus, fitted, chosen)
    yield from rows_of(
        data.map_batches(Encoder, fn_constructor_args=made_of, batch_size=spread.batch, compute=pool, **needs)
    )


def dataset_of(lines: Sequence[str], spread: RaySettings) -> Any:  # noqa: ANN401 - Ray's
    """Documents as Ray's dataset, in their order."""
    import ray.data  # sets up its log

    for name in ("ray.data", "ray.llm"):
        logging.getLogger(name).setLevel(logging.ERROR)  # rows show the progress
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    blocks = min(-(-len(lines) // spread.batch), _MOST_BLOCKS)
    return ray.data.from_items([{"ref": line} for line in lines], override_num_blocks=blocks)


def rows_of(data: Any) -> Generator[Row]:  # noqa: ANN401 - Ray's
    """Finished rows, one by one."""
    for batch in data.iter_batches(batch_size=None, prefetch_batches=0):
        yield from (Row.from_dict(json.loads(row)) for row in batch["row"])


def start_ray(spread: RaySettings) -> None:
    """Join the cluster, unless this process already has."""
    import ray

    if not ray.is_initialized():
        ray.init(address=spread.address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def _most_actors(resources: Mapping[str, float], spread: RaySettings) -> int:
    """Number of actors that fit a cluster."""
    rooms = [resources.get(name, 0) // each for name, each in (("GPU", spread.gpus), ("CPU", spread.cpus)) if each]
    return max(1, int(min(rooms, default=1)))


def _prepare(open_corpus: Callable[[], Corpus], lines: Sequence[str], options: RunOptions) -> dict[str, str]:
    """Digests of the profile and of the model's layout, or the error."""
    try:
        corpus = open_corpus()
        profile = prepare_profile(corpus, [DocumentRef.from_json(line) for line in lines], options)
    except KvwireError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"profile": profile.digest if profile else "", "config": corpus.config}


class Encoder:
    """An actor's work: batches of documents through the steps, concurrently."""

    def __init__(self, open_corpus: Callable[[], Corpus], fitted: Mapping[str, str], options: RunOptions) -> None:
        """Open engine and store, and read the profile."""
        self._options = options
        self._error: KvwireError | None = None
        try:
            self._corpus = open_corpus()
            if self._corpus.config != fitted["config"]:
                msg = "the model on this machine is not that of the run; put the same weights there, then run again"
                raise MismatchError(msg)
            self._batches = Batches(self._corpus.encoder().engine)
            self._profile = self._corpus.profile(fitted["profile"]) if fitted["profile"] else None
        except KvwireError as error:
            self._error = error

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Encode documents."""
        refs = [DocumentRef.from_json(str(line)) for line in batch["ref"]]
        if (error := self._error) is not None:
            return {"row": [failed_row(Row(ref.document_id, ref.source), error).to_json() for ref in refs]}
        works = encode_side_by_side(self._corpus, refs, self._profile, self._options, self._batches)
        return {"row": [work.row.to_json() for work in works]}
