"""Encoding on one machine: one document after another, or with reading, prefill, encoding and upload in parallel."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from itertools import zip_longest
from pathlib import PurePosixPath
from queue import Full, Queue
from typing import TYPE_CHECKING, TypeVar

from kvwire.codec import read_profile
from kvwire.offline.steps import DocumentSteps, RunOptions
from kvwire.runtime.calibrate import HELD_OUT
from kvwire.runtime.coding import CALIBRATION_TOKENS, EXTENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from kvwire.codec import AnyProfile
    from kvwire.offline.refs import DocumentRef
    from kvwire.offline.steps import Batches, Work
    from kvwire.runtime.coding import Document
    from kvwire.runtime.corpus import Corpus


SMALL = 8
"""Bytes for each token to fit on: a corpus of no more text is fitted on as it is, in its order."""
SHARE = 8
"""Of the tokens to fit on, one document gives an eighth at most, so that no long one is all of the sample."""
_progress = logging.getLogger("kvwire.progress")
T = TypeVar("T")
R = TypeVar("R")
AHEAD = 2
"""Documents queued between two steps, with their caches in memory."""
_POLL_S = 0.1


def stratified(refs: Sequence[DocumentRef]) -> list[DocumentRef]:
    """Order documents so that any first few hold every source and every length.

    A stratum is a source's folder, file or bucket and a power of two of bytes. Documents of each are taken evenly over
    its order: the middle first, then the quarters, and so on. The same documents give the same order.
    """
    strata: dict[tuple[str, int], list[DocumentRef]] = {}
    for ref in refs:
        place = ref.source if ref.kind != "text" else str(PurePosixPath(ref.source).parent)
        strata.setdefault((place, ref.size.bit_length()), []).append(ref)
    spread = ([group[at] for at in _spread(len(group))] for _, group in sorted(strata.items()))
    return [ref for turn in zip_longest(*spread) for ref in turn if ref is not None]


def _spread(size: int) -> list[int]:
    """0 to ``size``, exclusive, each once, in an order whose beginnings are spread: by the reversed bits."""
    bits = max(1, (size - 1).bit_length())
    return sorted(range(size), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))


def sample(
    refs: Sequence[DocumentRef],
    read: Callable[[DocumentRef], Document | None],
    tokens: int = CALIBRATION_TOKENS,
) -> list[Document]:
    """Choose text to fit a profile on."""
    whole = [ref for ref in refs if not ref.problem]
    if sum(ref.size for ref in whole) <= SMALL * tokens:
        return [document for ref in whole if (document := read(ref)) is not None]
    most_of_one = max(tokens // SHARE, -(-2 * tokens // len(whole)))
    return _enough((document for ref in stratified(whole) if (document := read(ref)) is not None), tokens, most_of_one)


def _enough(documents: Iterable[Document], wanted: int, most_of_one: int) -> list[Document]:
    from kvwire.runtime.coding import Document

    chosen: list[Document] = []
    tokens = behind = 0
    for document in documents:
        part = document.token_ids[:most_of_one]
        chosen.append(Document(document.document_id, part))
        behind += tokens >= wanted
        tokens += len(part)
        if behind >= HELD_OUT and tokens >= 2 * wanted:
            break
    return chosen


def prepare_profile(
    corpus: Corpus, refs: Sequence[DocumentRef], options: RunOptions | None = None
) -> AnyProfile | None:
    """Find the profile, or fit it on a sample of the documents and publish it.

    Args:
        corpus: Engine and store.
        refs: The documents.
        options: Encoding options.

    Returns:
        The profile; None if the store has none and there is too little text for one.

    Raises:
        KvwireError: As ``Encoder.prepare`` says.
    """
    chosen = options or RunOptions()
    steps, encoder = DocumentSteps(corpus, None, chosen), corpus.encoder()

    def read(ref: DocumentRef) -> Document | None:
        if not encoder.is_due(ref.document_id, chosen.encode_after):
            return None
        document = steps.read_document(ref)
        return document and encoder.calibration.without_anchors(document)  # a sample cuts documents

    def texts() -> list[Document]:
        _progress.info("reading texts to fit a profile on, of %d documents", len(refs))
        return sample(refs, read, EXTENTS[encoder.coding.calibration])

    profile = read_profile(chosen.profile) if chosen.profile else None
    return encoder.prepare(texts, force=chosen.force, refit=chosen.refit, profile=profile)


def encode_serially(
    corpus: Corpus, refs: Sequence[DocumentRef], profile: AnyProfile | None, options: RunOptions | None = None
) -> Generator[Work]:
    """Encode documents one at a time: the plain twin of ``encode_side_by_side``.

    Args:
        corpus: Engine and store.
        refs: The documents.
        profile: To encode with.
        options: Encoding options.

    Yields:
        Each finished document.
    """
    steps = _steps(corpus, refs, profile, options)
    for ref in refs:
        work = steps.begin(ref)
        for step in (steps.front, steps.compute, steps.code, steps.write):
            work = step(work)
        yield work


def encode_side_by_side(
    corpus: Corpus,
    refs: Sequence[DocumentRef],
    profile: AnyProfile | None,
    options: RunOptions | None = None,
    batches: Batches | None = None,
) -> Generator[Work]:
    """Encode documents in a pipeline: while one is read, others are computed, coded and written.

    Neighbours of one length run together if that changes no bit, so blobs never depend on other documents.

    Args:
        corpus: Engine and store.
        refs: The documents.
        profile: To encode with.
        options: Encoding options.
        batches: Shapes compared in earlier runs of the same engine; None: start anew.

    Yields:
        Each finished document, in the order given.
    """
    steps = _steps(corpus, refs, profile, options, batches)
    groups = ahead(list, steps.groups(map(steps.begin, refs)))
    computed = ahead(steps.compute_group, groups)
    coded = ahead(steps.code, (work for group in computed for work in group))
    written = ahead(steps.write, coded)
    try:
        yield from written
    finally:
        steps.stop()
        for lane in (written, coded, computed, groups):
            lane.close()


def _steps(
    corpus: Corpus,
    refs: Sequence[DocumentRef],
    profile: AnyProfile | None,
    options: RunOptions | None,
    batches: Batches | None = None,
) -> DocumentSteps:
    steps = DocumentSteps(corpus, profile, options or RunOptions(), batches)
    if corpus.encoder().coding.deviation:
        steps.measure_neighbours(refs)
    return steps


def ahead(step: Callable[[T], R], items: Iterable[T], depth: int = AHEAD) -> Generator[R]:
    """``map`` in a thread that runs ahead of the consumer."""
    queue: Queue[tuple[list[R], BaseException | None]] = Queue(depth)
    stopped = threading.Event()

    def put(results: list[R], error: BaseException | None = None) -> bool:
        while not stopped.is_set():
            with suppress(Full):
                queue.put((results, error), timeout=_POLL_S)
                return True
        return False

    thread = threading.Thread(target=_run, args=(step, items, put), name="kvwire-encode", daemon=True)
    thread.start()
    try:
        while True:
            results, error = queue.get()
            if error is not None:
                raise error
            if not results:
                return
            yield from results
    finally:
        stopped.set()
        thread.join()


def _run(step: Callable[[T], R], items: Iterable[T], put: Callable[..., bool]) -> None:
    """Queue each result as a list of one, then an empty list at the end or the error."""
    try:
        for item in items:
            if not put([step(item)]):
                return
        put([])
    except BaseException as error:  # noqa: BLE001 - raised again where results are taken
        put([], error)
