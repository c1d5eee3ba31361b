"""Documents on many machines: Ray hands them to actors, each of which holds an engine, the profile and the store.

Ray only distributes. What is done is told by the catalog, document by document, so whatever Ray runs again finds what
is there and goes on. Blobs are named by their content: a document that two actors encode is one blob.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvwire import errors
from kvwire._lazy import require
from kvwire.errors import KvwireError, MismatchError
from kvwire.offline.batches import Batches
from kvwire.offline.manifest import Row
from kvwire.offline.pipeline import encode_side_by_side, prepare_profile
from kvwire.offline.refs import DocumentRef
from kvwire.offline.steps import RunOptions, failed_row

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from kvwire.runtime.corpus import Corpus


_MOST_BLOCKS = 4096
"""That Ray plans with; each is several batches where there are more documents."""


@dataclass(frozen=True)
class RaySettings:
    """How work is spread.

    Attributes:
        actors: Processes with an engine each; 0: as many as the cluster has GPUs, or processors, for.
        gpus: Of each actor; parts of one are allowed.
        cpus: Of each actor.
        batch: Documents that an actor takes at once: it loses sight of no more when it is killed.
        address: Of a cluster; None: what RAY_ADDRESS names, or a cluster of this machine alone.
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

    The profile is found or fitted once, by one process, and is in the store before any document is encoded.

    Args:
        open_corpus: Opens engine and store; called in every actor, so it is to be picklable, and its store is one that
            all machines reach.
        refs: The documents; all machines read them under these names.
        options: What is encoded.
        settings: How work is spread.

    Yields:
        A row for each document, in the order given.

    Raises:
        ArgumentError: Ray is not installed.
        KvwireError: The corpus cannot be opened, or there is no profile to encode with.
    """
    require("ray", "ray", "--on ray")
    import ray

    chosen, spread = options or RunOptions(), settings or RaySettings()
    start_ray(spread)
    lines = [ref.to_json() for ref in refs]
    needs: dict[str, Any] = {"num_cpus": spread.cpus, "num_gpus": spread.gpus}
    fitted = ray.get(ray.remote(**needs)(_prepare).remote(open_corpus, ray.put(lines), chosen))
    if "error" in fitted:
        raise getattr(errors, fitted["error"])(fitted["message"])
    yield from _rows(lines, (open_corpus, fitted, chosen), needs, spread)


def _rows(
    lines: list[str], made_of: tuple[object, ...], needs: Mapping[str, Any], spread: RaySettings
) -> Generator[Row]:
    import ray.data

    data = dataset_of(lines, spread)
    actors = min(spread.actors or _most_actors(ray.cluster_resources(), spread), data.num_blocks())
    told = data.map_batches(
        Encoder,
        fn_constructor_args=made_of,
        batch_size=spread.batch,
        compute=ray.data.ActorPoolStrategy(size=actors),
        **needs,
    )
    yield from rows_of(told)


def dataset_of(lines: Sequence[str], spread: RaySettings) -> Any:  # noqa: ANN401 - Ray's
    """Documents as Ray hands them out, in their order."""
    import ray.data  # which sets up its log

    for name in ("ray.data", "ray.llm"):
        logging.getLogger(name).setLevel(logging.ERROR)  # rows tell how far the run is
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    blocks = min(-(-len(lines) // spread.batch), _MOST_BLOCKS)
    return ray.data.from_items([{"ref": line} for line in lines], override_num_blocks=blocks)


def rows_of(data: Any) -> Generator[Row]:  # noqa: ANN401 - Ray's
    """Rows as they are done."""
    for batch in data.iter_batches(batch_size=None, prefetch_batches=0):
        yield from (Row.from_dict(json.loads(row)) for row in batch["row"])


def start_ray(spread: RaySettings) -> None:
    """Join the cluster, unless this process is in one."""
    import ray

    if not ray.is_initialized():
        ray.init(address=spread.address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def _most_actors(resources: Mapping[str, float], spread: RaySettings) -> int:
    """How many actors a cluster has room for."""
    rooms = [resources.get(name, 0) // each for name, each in (("GPU", spread.gpus), ("CPU", spread.cpus)) if each]
    return max(1, int(min(rooms, default=1)))


def _prepare(open_corpus: Callable[[], Corpus], lines: Sequence[str], options: RunOptions) -> dict[str, str]:
    """The digests of the profile and of the model's layout, or the error."""
    try:
        corpus = open_corpus()
        profile = prepare_profile(corpus, [DocumentRef.from_json(line) for line in lines], options)
    except KvwireError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"profile": profile.digest if profile else "", "config": corpus.config}


class Encoder:
    """What an actor runs: batches of documents through the steps, side by side."""

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
