"""``kvwire encode``: text files into a store, here, on Ray, or with vLLM on Ray."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvwire.cli import options as opt
from kvwire.cli.inputs import model_name, open_engine, open_tokenizer, read_file, use_layout
from kvwire.cli.options import StoreOptions, argument, command, flag, option, use_file
from kvwire.cli.printing import LevelTotals, describe
from kvwire.cli.say import error_as_data, leave, say, stages
from kvwire.codec import DEFAULT_METHOD, methods
from kvwire.errors import ArgumentError, KvwireError, PartialError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvwire.codec import Backend
    from kvwire.offline import DocumentRef, Row, RunOptions, VllmSettings, Work
    from kvwire.runtime.coding import Encoded, Extent
    from kvwire.runtime.corpus import Corpus
    from kvwire.types import Chat

_USUAL = {
    "force": False, "refit": False, "method": DEFAULT_METHOD, "prefix_layers": 0, "lossless": False,
    "deviation": False, "neutral_prefix": 0, "links": None, "soft_tokens": None, "resume": None,
    "calibration": "full", "profile": None,
}  # fmt: skip
"""Options that say what is computed or coded beyond a document's cache: vLLM's connector does not."""


def check_options(options: Any) -> None:  # noqa: ANN401 - what kvwire encode is given
    """Refuse options that vLLM does not serve."""
    if options.on != "ray":
        raise ArgumentError("vLLM encodes on Ray, which needs no cluster of its own: add --on ray")
    others = [name for name, usual in _USUAL.items() if getattr(options, name) != usual]
    if others:
        name = others[0].replace("_", "-")
        msg = f"--{name} is not for --engine vllm, which saves plain caches of documents: leave it or --engine out"
        raise ArgumentError(msg)
    if options.gpus not in (0, options.tensor_parallel):
        msg = "each worker of vLLM takes one GPU with --device cuda: leave --gpus out, and set --tensor-parallel"
        raise ArgumentError(msg)


def vllm_settings(place: StoreOptions, options: Any) -> VllmSettings:  # noqa: ANN401 - what kvwire encode is given
    """What options mean to vLLM."""
    from kvwire.engines.transformers.identity import find_folder
    from kvwire.offline import VllmSettings

    place.open_lasting().close()  # which refuses what is none
    folder, _ = find_folder(options.model)
    connector = {"store": place.store, "token": place.token, "tenant": place.tenant, "salt": place.salt}
    connector |= {"keys": place.keys}
    is_cpu = options.device == "cpu"
    dtype = "float32" if is_cpu and options.dtype == "auto" else options.dtype
    return VllmSettings(
        str(folder), {name: value for name, value in connector.items() if value}, options.tensor_parallel,
        0.0 if is_cpu else 1.0, dtype, _engine_args(options.engine_args),
    )  # fmt: skip


def vllm_corpus(place: StoreOptions, model: str, uses: str | None) -> Corpus:
    """Open the store for a model that runs elsewhere; also called in actors."""
    from kvwire.offline.on_vllm import reading_engine
    from kvwire.runtime.corpus import Coding, Corpus, find_model

    store = place.open_lasting()
    record, pieces = find_model(place.catalog(store), model_name(model)), open_tokenizer(model)
    return Corpus(
        reading_engine(record, pieces, pieces.opening, len(pieces.tokenizer)),
        store,
        **place.whose(),
        coding=Coding(neutral_prefix=0),
        uses=use_file(uses),
    )


def _engine_args(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        msg = f"--engine-args is no JSON ({error}); write an object such as '{{\"max_model_len\": 8192}}'"
        raise ArgumentError(msg) from error
    if not isinstance(found, dict):
        raise ArgumentError("--engine-args is a JSON object of vLLM's arguments, such as '{\"max_model_len\": 8192}'")
    return found


def print_row(row: Row) -> None:
    """A line for a document that the store holds by now."""
    levels = "  ".join(f"{level.name} {level.bytes / 1e3:.0f} kB" for level in row.levels) or "kept as text"
    had = "  (had it already)" if row.status == "there already" else ""
    say(f"{row.id}: {row.tokens} tokens  {levels}{had}")


class EncodeOutput:
    """Takes rows as they come: a line each, the manifest, and at the end the levels, the failures and the error."""

    def __init__(self, refs: Sequence[DocumentRef], manifest: str | None, *, method: str, as_json: bool) -> None:
        """Print nothing yet."""
        self._refs, self._manifest, self._as_json = refs, manifest, as_json
        self._totals = LevelTotals(method)
        self._failures: dict[str, str] = {}
        self._documents: list[dict[str, Any]] = []
        self._done = 0

    def take(self, rows: Iterable[tuple[Row, Encoded | None]]) -> None:
        """Print and keep rows until they end."""
        from tqdm import tqdm

        from kvwire.offline import writing

        total = sum(ref.size for ref in self._refs)
        manifest = writing(self._manifest) if self._manifest else nullcontext()
        bar = tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="encoding", file=sys.stderr)
        with manifest as writer, bar:
            tokens = 0
            for ref, (row, encoded) in zip(self._refs, rows, strict=True):
                tokens += row.tokens
                bar.set_postfix(documents=self._done + len(self._failures) + 1, tokens=tokens, refresh=False)
                bar.update(ref.size)
                if writer is not None:
                    writer.add(row)
                with tqdm.external_write_mode():
                    self._tell(row, encoded)

    def fail_all(self, rows: Iterable[Row]) -> None:
        """Write a manifest of documents of which none was tried; where some were, there is none."""
        from kvwire.offline import writing

        if self._manifest and not (self._done or self._failures):
            with writing(self._manifest) as writer:
                for row in rows:
                    writer.add(row)

    def end(self) -> PartialError | None:
        """Print levels and failures."""
        failed = len(self._failures)
        error = PartialError(f"{failed} of {self._done + failed} documents were left out") if failed else None
        if self._as_json:
            say(json.dumps({"documents": self._documents, "failures": self._failures} | error_as_data(error)))
        else:
            self._totals.print()
        for document_id, problem in self._failures.items():
            say(f"kvwire: {document_id}: {problem}", err=True)
        return error

    def _tell(self, row: Row, encoded: Encoded | None) -> None:
        if row.status == "failed":
            name = row.id if row.id not in self._failures else f"{row.id} ({row.source})"
            self._failures[name] = row.problem
            return
        self._done += 1
        if self._as_json:
            self._documents.append(_described(row, encoded))
            return
        if row.levels:
            levels = [(level.name, level.bytes, level.error, level.kl) for level in row.levels]
            elements = round(8 * row.levels[0].bytes / row.levels[0].bits_per_element)
            self._totals.add(row.tokens, elements, levels)
        print_row(row)


def _described(row: Row, encoded: Encoded | None) -> dict[str, Any]:
    """A document as JSON: its blob's header where that is at hand, else its row."""
    if encoded is None:
        return json.loads(row.to_json())  # type: ignore[no-any-return]
    known = describe(encoded.blob) if encoded.blob else {"tokens": row.tokens, "text_only": encoded.entry.is_text}
    return {"id": row.id, "skipped": encoded.skipped, "seconds": encoded.encode_s} | known


_progress = logging.getLogger("kvwire.progress")
_ANY_QUESTION = "Why?"


@dataclass(frozen=True)
class _EncodeOptions:
    """What ``kvwire encode`` is given."""

    paths: tuple[str, ...] = argument(nargs=-1, required=True)
    model: str = opt.MODEL
    place: StoreOptions = opt.STORE
    device: str = opt.DEVICE
    dtype: str = opt.DTYPE
    force: bool = flag("Encode again what the store already has.")
    refit: bool = flag("Fit a new profile, and encode again documents with another one.")
    method: str = option(type=click.Choice(methods()), default=DEFAULT_METHOD)
    prefix_layers: int = opt.PREFIX_LAYERS
    lossless: bool = flag("Add a bit-exact level.")
    deviation: bool = flag("Measure how far tokens move behind others, for ask --selector product.")
    neutral_prefix: int = option(
        "Compute documents behind N tokens of a neutral text, which are dropped: links without repair lose less, "
        "prompts that begin with a document are not exact.",
        default=0, metavar="N", type=click.IntRange(0),
    )  # fmt: skip
    encode_after: int = option(
        "Keep documents with fewer than N counted uses as text; needs --uses.",
        default=0, type=click.IntRange(0), metavar="N",
    )  # fmt: skip
    calibration: Extent = opt.CALIBRATION
    profile: Path | None = option(
        "Encode with this profile (kvwire profile fit) instead of fitting one; the store keeps it.", type=opt.FILE
    )
    resume: Path | None = opt.RESUME
    links: str | None = opt.LINKS
    soft_tokens: Path | None = opt.SOFT_TOKENS
    index: tuple[str, ...] = opt.INDEX
    chat: bool = flag("Also keep the rows that the model's chat template puts before documents, for chats in vLLM.")
    system: str | None = option("With --chat, the system turn.")
    before: str = opt.CHAT_BEFORE
    uses: str | None = opt.USES
    backend: Backend = opt.BACKEND
    text_column: str = option("The text's field in rows.", default="text", metavar="NAME")
    id_column: str = option("The document id's field in rows.", default="id", metavar="NAME")
    manifest: str | None = option("Write a row for each document: .parquet, or .jsonl.", metavar="FILE")
    on: str | None = option("Encode on a Ray cluster (RAY_ADDRESS).", type=click.Choice(["ray"]))
    engine: str = option(
        "What runs the model; vllm, on Ray, for one that needs several GPUs: the store has its profile before.",
        type=click.Choice(["transformers", "vllm"]), default="transformers",
    )  # fmt: skip
    tensor_parallel: int = option("Tensor-parallel workers of vLLM.", default=1, type=click.IntRange(1), metavar="N")
    engine_args: str = option("Further arguments of vLLM's engine, as a JSON object.", default="", metavar="JSON")
    actors: int = option("Engines on Ray; 0: as many as fit.", default=0, type=click.IntRange(0), metavar="N")
    gpus: float = option("GPUs of each engine on Ray.", default=0.0, type=click.FloatRange(0), metavar="G")
    cpus: float = option("Processors of each engine on Ray.", default=1.0, type=click.FloatRange(0), metavar="C")
    as_json: bool = opt.JSON


@command(_EncodeOptions)
def encode(options: _EncodeOptions) -> None:
    """Encode documents into a store: text files, folders of them, globs, .jsonl and .parquet files, s3:// prefixes.

    A document's id is its path below the folder named, without its ending, or the id of its line or row. What the
    catalog has already is skipped. A document's line is printed once the store holds it.
    """
    from kvwire.offline import find_documents
    from kvwire.offline.manifest import Row, check_manifest_name
    from kvwire.offline.steps import failed_row

    if options.manifest:
        check_manifest_name(options.manifest)
    refs = find_documents(options.paths, text_column=options.text_column, id_column=options.id_column)
    output = EncodeOutput(refs, options.manifest, method=options.method, as_json=options.as_json)
    if options.chat and (options.on or options.engine == "vllm"):
        msg = "--chat computes a few rows with the model here: leave out --on and --engine, or run it once by itself"
        raise ArgumentError(msg)
    if (options.system is not None or options.before) and not options.chat:
        raise ArgumentError("--system and --before are of a chat: give --chat, too")
    run = _on_vllm if options.engine == "vllm" else _on_ray if options.on == "ray" else _here
    if run is not _on_vllm and (options.tensor_parallel != 1 or options.engine_args):
        raise ArgumentError("--tensor-parallel and --engine-args are vLLM's: add --engine vllm --on ray")
    try:
        with stages():
            run(options.place, options, refs, output)
    except KvwireError as error:
        output.fail_all(failed_row(Row(ref.document_id, ref.source), error) for ref in refs)
        raise
    if partial_error := output.end():
        leave(partial_error)


def open_corpus(place: StoreOptions, options: _EncodeOptions) -> Corpus:
    """Open the engine and the store that options name; also called in the actors of a run on many machines."""
    from kvwire.runtime.coding import Coding
    from kvwire.runtime.corpus import Corpus

    engine = open_engine(options.model, options.device, options.dtype)
    layout = use_layout(engine, options.links, options.soft_tokens)
    coding = Coding(
        options.method, options.prefix_layers, options.lossless, backend=options.backend,
        deviation=options.deviation, neutral_prefix=options.neutral_prefix, layout=layout,
        resume=options.resume, calibration=options.calibration,
    )  # fmt: skip
    return Corpus(engine, place.open_lasting(), **place.whose(), coding=coding, uses=use_file(options.uses))


def _what(options: _EncodeOptions) -> RunOptions:
    from kvwire.offline import RunOptions

    if options.profile and options.refit:
        raise ArgumentError("--refit fits a new profile, and --profile names one: leave one of them out")
    data = read_file(options.profile, "--profile names a file of kvwire profile fit") if options.profile else b""
    return RunOptions(options.force, options.encode_after, options.index, options.refit, data)


def _here(place: StoreOptions, options: _EncodeOptions, refs: Sequence[DocumentRef], output: EncodeOutput) -> None:
    from kvwire.offline import encode_side_by_side, prepare_profile
    from kvwire.types import Chat

    what = _what(options)
    _progress.info("opening %s", options.model)
    corpus = open_corpus(place, options)
    profile = prepare_profile(corpus, refs, what)
    _progress.info("encoding %d documents", len(refs))
    chat = Chat(options.system, before=options.before) if options.chat else None
    with closing(encode_side_by_side(corpus, refs, profile, what)) as works:
        checked = check_in_chat(corpus, chat, works) if chat else works
        output.take((work.row, work.encoded) for work in checked)
    if chat:
        corpus.put_chat_head(chat)


def check_in_chat(corpus: Corpus, chat: Chat, works: Iterable[Work]) -> Iterator[Work]:
    """Tell of documents whose end a chat's template would cut otherwise; all are stored all the same."""
    from kvwire.runtime.answer import ChatAsked

    engine = corpus.encoder().engine
    asked = ChatAsked(chat, _ANY_QUESTION, engine.render_chat(chat, _ANY_QUESTION))
    for work in works:
        yield work
        ids = work.document and work.row.status != "failed" and work.document.token_ids
        if ids and (trouble := asked.apart(engine, [ids])):
            _progress.warning("document %r in a chat: %s", work.ref.document_id, trouble)


def _on_ray(place: StoreOptions, options: _EncodeOptions, refs: Sequence[DocumentRef], output: EncodeOutput) -> None:
    from kvwire.offline import RaySettings, encode_on_ray

    if options.deviation:
        raise ArgumentError("--deviation compares a document with all others of a run: encode without --on ray")
    settings = RaySettings(options.actors, options.gpus, options.cpus)
    rows = encode_on_ray(partial(open_corpus, place, options), refs, _what(options), settings)
    output.take((row, None) for row in rows)


def _on_vllm(place: StoreOptions, options: _EncodeOptions, refs: Sequence[DocumentRef], output: EncodeOutput) -> None:
    from kvwire.offline import RaySettings, encode_on_vllm

    check_options(options)
    vllm = vllm_settings(place, options)
    settings = RaySettings(options.actors, cpus=options.cpus)
    opened = partial(vllm_corpus, place, vllm.model, options.uses)
    rows = encode_on_vllm(opened, refs, vllm, _what(options), settings)
    output.take((row, None) for row in rows)
