"""What happens to loads and what they ask for: events go in, instructions come out. Plain data, no behaviour.

Instants are seconds of the clock that the controller is driven by. ``load`` is the number of a load, ``document`` that
of a document in its prompt; a ``ChunkId`` names both. ``seconds`` is how long something took, ``reason`` why, in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvwire.types import ChunkId, Decision

    from .documents import DocumentPlanInput
    from .repair import RepairOption
    from .settings import Goal


@dataclass(frozen=True)
class LoadRequested:
    """A load begins."""

    load: int
    documents: int  # how many it has
    query_tokens: int  # of the question, and whatever else is computed before the first token
    goal: Goal  # what is wanted, and by when
    repair: RepairOption | None = None  # what repairing its links may take and gives; None: they stay as they are
    # the question can be run on the prompt while finer levels are fetched, to see where it looks: see ``Look``
    looks: bool = False
    # tokens that are computed behind each document, those before the first one with it; they count in ``query_tokens``
    # until a ``Repair`` has computed them. Empty: none are before the last chunk, as in a load with ``repair``, whose
    # rows they see
    links: tuple[int, ...] = ()


@dataclass(frozen=True)
class IndexKnown:
    """What can be done about a document is known now."""

    load: int
    document: int
    # the same document as blobs with different head starts, chunk for chunk of the same tokens; usually one. A
    # document whose blob is of no use has one variant without bytes
    variants: tuple[DocumentPlanInput, ...]


@dataclass(frozen=True)
class FirstByte:
    """A request's first byte came, ``seconds`` after the request."""

    seconds: float


@dataclass(frozen=True)
class TransferProgress:
    """Bytes came between two instants."""

    bytes: int
    # the first byte's arrival, or the end of this request's last report; never the sending of the request. Report
    # several times within the settings' ``stall_s``, and what has come before every ``Tick``
    started: float
    ended: float  # when the last of them had come


@dataclass(frozen=True)
class ChunkArrived:
    """A fetch is over, its bytes sound up to ``level``, which is below the level asked for where some are lost."""

    chunk: ChunkId
    level: int  # the finest that is sound
    trouble: str = ""  # what was lost, in words


@dataclass(frozen=True)
class ChunkFailed:
    """A fetch is over and brought nothing of use: missing, corrupt, or the link is gone."""

    chunk: ChunkId
    reason: str


@dataclass(frozen=True)
class DecodeDone:
    """A batch of chunks is decoded, in ``seconds`` of compute."""

    chunks: tuple[ChunkId, ...]
    seconds: float


@dataclass(frozen=True)
class DecodeFailed:
    """A batch is over and some of its chunks cannot be decoded; the others can be used."""

    chunks: tuple[ChunkId, ...]  # of the batch
    bad: tuple[ChunkId, ...]  # these chunks, at least one
    reason: str


@dataclass(frozen=True)
class RecomputeDone:
    """A forward pass over the instruction's chunks ended, after ``seconds`` of compute."""

    chunks: tuple[ChunkId, ...]
    seconds: float
    blind: bool = False  # it saw its own document alone, though it was to see those before as well: that failed
    copied: bool = False  # some of it came from another load's prompt; nothing is learnt of what a pass takes


@dataclass(frozen=True)
class RecomputedTogether:
    """The passes of one ``RecomputeTogether`` ended, after ``seconds`` of compute in all."""

    passes: tuple[Recompute, ...]
    seconds: float  # how long they took
    joined: bool = True  # all of them ran, and in one pass; else nothing is learnt of what one takes
    failed: tuple[RecomputeFailed, ...] = ()  # of each pass that failed a chunk, and why; nothing of that pass is valid
    # the first chunk of each pass that saw its own document alone, though it was to see those before as well
    blind: tuple[ChunkId, ...] = ()
    # loads whose passes cannot be rows of a joined one; they ran alone, and do so from now on
    unfit: tuple[int, ...] = ()
    copied: bool = False  # as in ``RecomputeDone``


@dataclass(frozen=True)
class RecomputeFailed:
    """A forward pass failed as a whole; ``chunk`` of it is not to be recomputed again."""

    chunk: ChunkId
    reason: str


@dataclass(frozen=True)
class RecomputeInterrupted:
    """A forward pass ended early, since an ``Interrupt`` asked for that: nothing of it is computed.

    A pass that was over by then, or that could not be stopped any more, is told as any other.
    """

    chunks: tuple[ChunkId, ...]
    seconds: float  # how long it had run


@dataclass(frozen=True)
class PrefixComputed:
    """A document's first layers are computed, in ``seconds``: its chunks can be decoded."""

    load: int
    document: int
    seconds: float


@dataclass(frozen=True)
class PrefixFailed:
    """A document's first layers cannot be computed: its blob is of no use."""

    load: int
    document: int
    reason: str


@dataclass(frozen=True)
class Looked:
    """The question has run on a prompt whose chunks are all valid, at whatever level."""

    load: int
    # what the question's attention gives to a token of each chunk, over what it gives to a token of the prompt in the
    # mean, ``[document][chunk]``; empty where nothing was to be seen
    attention: tuple[tuple[float, ...], ...]
    seconds: float


@dataclass(frozen=True)
class RepairDone:
    """The rows of a ``Repair`` are computed, or it failed and changed nothing that is relied on."""

    load: int
    documents: int  # of the instruction
    rows: int  # how many were computed
    left: int  # how many of the share are still to be computed, in later documents
    seconds: float
    trouble: str = ""  # why it failed, in words; rows are then computed after the last chunk alone


@dataclass(frozen=True)
class PromptAssembled:
    """A load that was finished is linked and its question has run: until then its closing keeps the engine busy."""

    load: int
    prompt_tokens: int  # length of all documents together
    # linking and handing over, which is what it took beyond the repair and the time expected of the question's pass;
    # below 0 where that was quicker
    seconds: float
    repair_s: float = 0.0  # seconds of choosing rows and computing them anew
    # how many rows each pass inside the prompt computed, where no repair was planned; then ``repair_s`` is of these
    # passes alone
    rows: tuple[int, ...] = ()
    # of forward passes over the prompt: new tokens, tokens before them, and seconds
    passes: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True)
class Tick:
    """Time has passed: send one at ``Controller.wake_at``, and as often besides as you like."""


@dataclass(frozen=True)
class DriverPaused:
    """The driver heard of nothing for a while: a collection of garbage, or whatever else held its thread up.

    What came meanwhile is told later than it came, and what was asked for just before may not have been sent. So the
    link was not silent for that, and a pass that ran is not slow for it.
    """

    seconds: float  # how long, until now


@dataclass(frozen=True)
class LoadAbandoned:
    """Nobody waits for a load any more."""

    load: int


@dataclass(frozen=True)
class Fetch:
    """Fetch levels first..level of a chunk."""

    chunk: ChunkId
    first: int  # 0, or above 0 for a refinement: what is below has arrived
    level: int  # the last one
    bytes: int  # of these levels
    variant: int
    until: float  # the instant after which the bytes are of no use: give up then at the latest, and say ``ChunkFailed``


@dataclass(frozen=True)
class Decode:
    """Decode chunks of one load, each at its level, from all bytes of it that have arrived."""

    chunks: tuple[ChunkId, ...]
    levels: tuple[int, ...]  # of each chunk


@dataclass(frozen=True)
class Recompute:
    """Compute chunks first..last of one document in one forward pass; what is before them in it is ready."""

    first: ChunkId
    last: ChunkId
    # it sees the documents before its own as well, all of which are valid, as a prefill of the prompt would; nothing
    # of these is decoded until the pass is over
    behind: bool = False


@dataclass(frozen=True)
class Interrupt:
    """Stop the forward pass of a ``Recompute`` as soon as the engine can; its end is to be told all the same."""

    first: ChunkId


@dataclass(frozen=True)
class RecomputeTogether:
    """Compute chunks of several loads in one forward pass, a row for each; ``RecomputedTogether`` is to follow."""

    passes: tuple[Recompute, ...]


@dataclass(frozen=True)
class ComputePrefix:
    """Compute the first layers of a document, for this variant of its blob."""

    load: int
    document: int
    variant: int


@dataclass(frozen=True)
class Look:
    """Run the question on the prompt as it is, all of which is valid, and tell what it attends to.

    Nothing of the prompt is decoded until ``Looked`` is told.
    """

    load: int


@dataclass(frozen=True)
class Repair:
    """Compute rows of the prompt's first documents anew, but for those that were: these documents stay as they are.

    Nothing of them is decoded any more, whatever is still fetched and decoded behind them. Of a load with link tokens
    these are computed, those behind each of the documents.
    """

    load: int
    documents: int  # how many documents, from the prompt's beginning on
    # of the prompt's rows, those behind ``front``, which ones are computed in all; the same for all of a load
    share: float
    front: int  # see ``Finish``


@dataclass(frozen=True)
class Cancel:
    """Stop a fetch; whatever is still reported about it is ignored."""

    chunk: ChunkId
    reason: str


@dataclass(frozen=True)
class Release:
    """Forget the bytes that were fetched for a chunk: they are not asked for again."""

    chunk: ChunkId


@dataclass(frozen=True)
class Finish:
    """All chunks of a load are ready: its closing begins, and ``PromptAssembled`` or ``LoadAbandoned`` follows."""

    load: int
    decisions: tuple[Decision, ...]  # what was done, in prompt order
    reason: str  # whether the first token should be in time, in words
    # share of the prompt's rows to compute anew before the question runs, of those behind ``front``; what a ``Repair``
    # has computed is done
    repair: float = 0.0
    # tokens from the prompt's beginning on that see all that stands before them: its first document, and what was
    # recomputed behind it without a gap
    front: int = 0


@dataclass(frozen=True)
class Fail:
    """A prompt cannot be made ready: a chunk can neither be fetched nor recomputed."""

    load: int
    reason: str


@dataclass(frozen=True)
class Refuse:
    """A load that came in just now would be late, and its goal says that it is not to be served then."""

    load: int
    late_s: float  # seconds by which it would be late, margin included: before that it is of no use to ask again


Event: TypeAlias = (
    LoadRequested
    | IndexKnown
    | FirstByte
    | TransferProgress
    | ChunkArrived
    | ChunkFailed
    | DecodeDone
    | DecodeFailed
    | RecomputeDone
    | RecomputedTogether
    | RecomputeFailed
    | RecomputeInterrupted
    | PrefixComputed
    | PrefixFailed
    | Looked
    | RepairDone
    | PromptAssembled
    | Tick
    | DriverPaused
    | LoadAbandoned
)
Instruction: TypeAlias = (
    Fetch
    | Decode
    | Recompute
    | Interrupt
    | RecomputeTogether
    | ComputePrefix
    | Look
    | Repair
    | Cancel
    | Release
    | Finish
    | Fail
    | Refuse
)


@dataclass(frozen=True)
class LogEntry:
    """One call of ``Controller.handle``: enough of them replay what happened."""

    now: float
    event: Event
    instructions: tuple[Instruction, ...]
