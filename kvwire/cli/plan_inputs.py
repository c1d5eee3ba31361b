"""What ``kvwire plan`` plans with: documents of stores, files or none, costs of engines or machines, and a link."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import click

from kvwire._json import json_object
from kvwire.cli import options as opt
from kvwire.cli.inputs import (
    find_entry,
    open_engine,
    read_file,
    read_file_header,
    read_link,
    read_machine,
    read_shape,
    read_tokens,
)
from kvwire.cli.options import StoreOptions, argument, flag, option, repair_of, usual
from kvwire.errors import ArgumentError, CorruptError, MismatchError, NotFoundError

if TYPE_CHECKING:
    from kvwire.controller import ControllerSettings, DecodeCost, DocumentPlanInput, Estimates, Goal, Objective
    from kvwire.controller.simulator import Machine, Model
    from kvwire.engines.base import Engine
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import Store
    from kvwire.types import BlobInfo
    from kvwire.whatif.situation import Details, PlanScenario

_BLOB = ".kvw"
_MOST_TOKENS = 1 << 22
_MOST_BYTES = 1 << 24  # of a file of estimates: a long plan's chunks may be in it
COMPUTE = {"workers": 2, "decode_batch": 1 << 16, "decode_threads": 1 << 10}
"""Of the settings, what depends on the engine's machine, and the most that each may be."""
_RAW_BYTES = 2  # of an element: caches that are not coded are bfloat16


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What ``kvwire plan`` is given."""

    docs: tuple[str, ...] = option("Ids of documents of the store, or .kvw files, in the prompt's order.")
    more_docs: tuple[str, ...] = argument(nargs=-1)
    context: str | None = option(
        "Instead of --docs: a made-up prompt of so many tokens, such as 32k.", metavar="TOKENS"
    )
    prompt: Path | None = option("Instead of --docs: file with a whole prompt, planned as for ask --prompt.")
    documents: int = option("Number of documents that --context is split into.", default=1, type=click.IntRange(1, 128))
    model: str | None = option("Folder of the model; its costs are remembered or measured.", envvar="KVWIRE_MODEL")
    device: str = opt.DEVICE
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt.DTYPE
    machine: str | None = option("Instead of --model: a machine by name, such as h100, 4xh100 or cpu; needs --shape.")
    shape: str | None = option("The model's shape by name, such as llama-3.1-8b; needs --machine.")
    estimates: str | None = option("Instead of --model: what kvwire plan --json printed.", metavar="FILE")
    workers: str | None = option("2: decode while recomputing.", type=click.Choice(["1", "2"]))
    config: str = opt.CONFIG
    link: str | None = option("1gbit or 1gbit,2ms; without it, what is remembered of the link to the store.")
    deadline: float | None = option("Seconds until the first token.", type=opt.ABOVE_0)
    objective: Objective | None = opt.OBJECTIVE
    exact: bool = flag("Bit-exact caches only, as in ask.")
    max_kl: float | None = opt.MAX_KL
    floor: int | None = opt.FLOOR
    question_tokens: int = option("Length of the question.", default=32, type=click.IntRange(1, 1 << 20))
    repair: str = opt.REPAIR
    price: str | None = option(
        "Also print costs in money, by prices such as gpu_hour=1.79,gb_month=0.023,egress=0.09.", metavar="PRICES"
    )
    tiers: str | None = option(
        "Also from devices, and which is the cheapest that is fast enough: NAME=BANDWIDTH,LATENCY,PRICE of a GB and "
        'month, such as "nvme=38gbit,0.1ms,0.08 s3=1gbit,20ms,0.023".',
        metavar="DEVICES",
    )
    compare: bool = option("Also work out alternatives and break-even points.", "--compare/--no-compare", default=True)
    place: StoreOptions = opt.STORE
    as_json: bool = opt.JSON

    @classmethod
    def of_document(cls, name: str, config: str, **given: Any) -> Self:  # noqa: ANN401 - options' values
        """Options for one document of a store, as the command line's defaults are, but without repair."""
        from kvwire.controller import MAX_KL

        return cls(**usual(cls) | {"docs": (name,), "config": config, "max_kl": MAX_KL, "repair": "none"} | given)

    def check(self) -> None:
        """Refuse options that do not go together, and files that are none."""
        wrong = ""
        if self.context is None and not self.names:
            wrong = "nothing to plan: name documents (--docs A B C), or make some up (--context 32k)"
        elif self.context is not None and self.names:
            wrong = "documents are either named (--docs) or made up (--context), not both: leave one out"
        elif bool(self.machine) != bool(self.shape):
            wrong = "--machine and --shape go together: a machine's costs depend on the model's shape"
        elif self.machine and self.estimates:
            wrong = "costs are those of --machine or those of --estimates: give one of them"
        elif self.context is not None and not self.shape:
            wrong = "--context needs --machine and --shape: sizes of documents depend on the model's shape"
        elif not (self.model or self.is_modelled):
            wrong = "whose costs? give --model, --machine with --shape, or --estimates"
        if wrong:
            raise ArgumentError(wrong)
        for name in self.names:
            looks_like_file = name.endswith(_BLOB) or (os.sep in name and self.place.store is None)
            if looks_like_file and not _is_file(name):
                msg = f"{name} is not a {_BLOB} file; check the path, or name a document's id and its --store"
                raise NotFoundError(msg)

    @property
    def kl_bound(self) -> float | None:
        """``max_kl`` where nothing else stands in its place."""
        return None if self.exact or self.floor is not None else self.max_kl

    @property
    def names(self) -> tuple[str, ...]:
        """Documents that were named, in the prompt's order."""
        return (*self.docs, *self.more_docs)

    @property
    def needs_store(self) -> bool:
        """Whether any document is looked up."""
        return any(not _is_file(name) for name in self.names)

    @property
    def is_modelled(self) -> bool:
        """Whether costs come from elsewhere than an engine."""
        return bool(self.machine or self.estimates)

    def modelled(self) -> tuple[Machine, Model]:
        """The machine and the shape that were named."""
        return read_machine(self.machine or ""), read_shape(self.shape or "")


@dataclass(frozen=True)
class Prompt:
    """Documents as planning takes them."""

    names: tuple[str, ...]  # in prompt order
    inputs: tuple[DocumentPlanInput, ...]  # in prompt order
    details: Details  # beyond what planning needs
    sizes: str = ""  # where sizes come from that are not the documents' own, in words; empty where they are
    notes: tuple[str, ...] = ()  # what is to be told of documents, in words

    @property
    def stored_bytes(self) -> int:
        """Of the documents' blobs: their headers, and their chunks at the finest level, which hold all coarser ones."""
        return self.details.header_bytes + sum(sizes[-1] for each in self.inputs for sizes in each.fetch_bytes if sizes)

    @property
    def raw_bytes(self) -> int:
        """Of their uncompressed caches; 0 where that is not known."""
        return self.details.raw_token_bytes * sum(sum(each.tokens) for each in self.inputs)


class Sources:
    """Where documents and costs come from. With an engine there is a corpus, otherwise costs are modelled."""

    def __init__(self, options: PlanOptions, store: Store | None) -> None:
        """Open the model where its costs are wanted."""
        from kvwire.runtime.corpus import Corpus
        from kvwire.store import MemoryStore

        self._options, self._store = options, store
        self._engine: Engine | None = None
        self._corpus: Corpus | None = None
        if not options.is_modelled:
            self._engine = open_engine(options.model or "", options.device, options.dtype)
            self._corpus = Corpus(self._engine, store or MemoryStore(), **options.place.whose())

    def scenario(self, goal: Goal) -> tuple[Prompt, PlanScenario]:
        """What is planned."""
        from kvwire.controller.repair import unmeasured
        from kvwire.whatif.situation import PlanScenario

        prompt, options = self.prompt(), self._options
        documents, repair = tuple((each,) for each in prompt.inputs), unmeasured(repair_of(options.repair))
        return prompt, PlanScenario(
            documents, self.estimates(), goal, self.settings(), options.question_tokens, prompt.details, repair
        )

    # Documents.

    def prompt(self) -> Prompt:
        """The documents; only their headers are read."""
        options = self._options
        if options.context is not None:
            return self._made_up(options.context)
        headers = [self._header(name) for name in options.names]
        notes = self._notes(headers)
        headers = [self._usable(header) for header in headers]
        inputs = tuple(_input(header, exact=options.exact, max_kl=options.kl_bound) for header in headers)
        return Prompt(options.names, inputs, self._details(headers), notes=notes)

    def _notes(self, headers: list[BlobInfo | int]) -> tuple[str, ...]:
        """Of documents that are not as good as is wanted: exact, or within the greatest KL divergence."""
        from kvwire.runtime.answer import floor_trouble

        options = self._options
        told = [
            (name, header) for name, header in zip(options.names, headers, strict=True) if not isinstance(header, int)
        ]
        if options.exact:
            troubles = [(name, self._exact_trouble(header)) for name, header in told]
        else:
            most = inf if options.max_kl is None else options.max_kl
            troubles = [(name, floor_trouble(header, most, options.floor)) for name, header in told]
        return tuple(f"{name}: {trouble}" for name, trouble in troubles if trouble)

    def _usable(self, header: BlobInfo | int) -> BlobInfo | int:
        """What a load uses: the text instead of a blob that is not exact enough."""
        return header if isinstance(header, int) or not self._exact_trouble(header) else header.tokens

    def _exact_trouble(self, header: BlobInfo) -> str:
        """Why ``--exact`` cannot use a blob, whatever its levels; empty where it can."""
        from kvwire.runtime.document import dtype_trouble

        if not self._options.exact or self._corpus is None:
            return ""
        return dtype_trouble(header.meta.dtype, self._corpus.meta.dtype)

    def _made_up(self, context: str) -> Prompt:
        """Documents of equal lengths with sizes as measured."""
        from kvwire.controller.simulator import documents_for, expected_kl, measured, source_in_words
        from kvwire.whatif.situation import Details

        tokens, count = read_tokens(context, _MOST_TOKENS), self._options.documents
        if tokens < count:
            msg = f"{tokens} tokens do not make {count} documents; make up a longer context, or fewer documents"
            raise ArgumentError(msg)
        _, model = self._options.modelled()
        lengths = [tokens // count + (number < tokens % count) for number in range(count)]
        details = Details(
            level_names=measured()["kvwire"].levels, level_kl=(expected_kl(model),) * count,
            raw_token_bytes=_RAW_BYTES * model.cache_elements, raw_decode=self._raw_decode(),
        )  # fmt: skip
        names = tuple(f"document {number + 1}" for number in range(count))
        made = documents_for(model, lengths, max_kl=self._options.kl_bound)
        return Prompt(names, tuple(made), details, source_in_words(model))

    def _header(self, name: str) -> BlobInfo | int:
        """What a document's blob says of itself; its tokens where only the text is kept."""
        if _is_file(name):
            info = read_file_header(Path(name))
        elif self._store is None:
            raise NotFoundError(f"{name} is no {_BLOB} file; to look it up as a document's id name --store")
        else:
            catalog = self._corpus.catalog if self._corpus else self._options.place.catalog(self._store)
            entry = self._corpus.find(name) if self._corpus else find_entry(catalog, self._options.config, name)[1]
            if entry.is_text:
                return entry.tokens
            info = catalog.blobs.header(entry)
        self._check_fits(name, info)
        return info

    def _check_fits(self, name: str, info: BlobInfo) -> None:
        """Raise MismatchError where a blob is of another model than the one that costs are of."""
        wrong = ""
        if self._corpus and not info.meta.shares_config(self._corpus.meta):
            wrong = f"{name} was encoded by model {info.meta.model_id!r}, this is {self._corpus.meta.model_id!r}"
        if self._options.machine:
            shape = self._options.modelled()[1]
            if info.meta.elements_per_token != shape.cache_elements:
                wrong = (
                    f"{name} holds {info.meta.elements_per_token} elements for each token, "
                    f"{shape.name} caches {shape.cache_elements}"
                )
        if wrong:
            raise MismatchError(f"{wrong}; name its own model: --model, or --shape with --machine")

    def _details(self, headers: list[BlobInfo | int]) -> Details:
        """What headers tell beyond what planning needs."""
        from kvwire.whatif.situation import Details

        infos = [header for header in headers if not isinstance(header, int)]
        levels = max((info.levels for info in infos), key=len, default=())
        elements = {info.meta.elements_per_token for info in infos}
        return Details(
            level_names=tuple(level.name for level in levels),
            level_kl=tuple(() if isinstance(header, int) else _kl(header) for header in headers),
            header_bytes=sum(info.header_bytes for info in infos),
            raw_token_bytes=_RAW_BYTES * elements.pop() if len(elements) == 1 else 0,
            raw_decode=self._raw_decode(),
        )

    def _raw_decode(self) -> DecodeCost:
        """Of uncompressed caches; a copy that was not measured on an engine."""
        from kvwire.controller import DecodeCost
        from kvwire.controller.simulator import costs

        if not self._options.machine:
            return DecodeCost(0.0, 0.0)
        machine, model = self._options.modelled()
        return costs(model, machine, raw=True).decode

    # Costs and the link.

    def estimates(self) -> Estimates:
        """Of the engine or machine, and of the link that was named or is remembered."""
        from kvwire.runtime.estimates_file import EstimatesFile, link_key
        from kvwire.whatif.situation import known_link

        link = read_link(self._options.link) if self._options.link else None
        state: dict[str, object] = {"version": 1}
        age_s = 0.0
        if self._store is not None:
            known = EstimatesFile.of_environment().recall(link_key(self._store.url), "")
            state, age_s = known.state, known.age_s
        if self._options.estimates:
            state |= _read_plan(Path(self._options.estimates))["estimates"]
        if link is None and "link" not in state:
            where = f"the link to {self._store.url}" if self._store else "any link"
            msg = f"nothing is remembered of {where}: give --link, such as 1gbit,2ms, or load from the store once"
            raise ArgumentError(msg)
        estimates = self._engine_estimates(state, age_s)
        return known_link(estimates, link.bandwidth_bytes_s, link.rtt_s) if link else estimates

    def settings(self) -> ControllerSettings:
        """How loads would be steered: on the machine, as the file of estimates says, or by the device."""
        from kvwire.controller.simulator import settings_for
        from kvwire.runtime.settings import LoadSettings, controls_of

        options = self._options
        if options.machine:
            chosen = settings_for(options.modelled()[0])
        else:
            on_gpu = options.device.startswith("cuda") and not options.estimates
            chosen = controls_of(LoadSettings(), on_gpu=on_gpu)
        if options.estimates:
            chosen = replace(chosen, **_read_plan(Path(options.estimates)).get("compute", {}))
        return replace(chosen, workers=int(options.workers)) if options.workers else chosen

    def _engine_estimates(self, state: dict[str, object], age_s: float) -> Estimates:
        from kvwire.controller import Estimates
        from kvwire.controller.simulator import costs
        from kvwire.runtime.loader import Loader
        from kvwire.runtime.settings import LoadSettings

        if self._engine and self._corpus:
            with Loader(self._engine, self._corpus) as loader:
                return loader.estimates
        given = None
        if self._options.machine:
            machine, model = self._options.modelled()
            given = costs(model, machine)
            state = {part: value for part, value in state.items() if part != "engine"}
        usual = LoadSettings()
        return Estimates.of_state(state, given, usual.bandwidth_prior, usual.ttfb_prior_s, age_s=age_s)


def _is_file(name: str) -> bool:
    return name.endswith(_BLOB) and Path(name).is_file()


def _input(header: BlobInfo | int, *, exact: bool, max_kl: float | None) -> DocumentPlanInput:
    from kvwire.controller import DocumentPlanInput
    from kvwire.controller.simulator.sizes import chunk_lengths

    if isinstance(header, int):
        return DocumentPlanInput(chunk_lengths(header))
    share = min(1.0, header.prefix_layers / max(1, len(header.meta.layers)))
    return DocumentPlanInput.from_blob(header, prefix_share=share, exact=exact, max_kl=max_kl)


def _kl(info: BlobInfo) -> tuple[float, ...]:
    known = [level.predicted_kl for level in info.levels]
    return tuple(kl for kl in known if kl is not None) if None not in known else ()


def _read_plan(path: Path) -> dict[str, Any]:
    """Of a printed plan ``estimates``, which are checked later, and ``compute`` unless estimates stand alone."""
    advice = "name what kvwire plan --json printed"
    state = json_object(read_file(path, advice, _MOST_BYTES), str(path), _MOST_BYTES, advice)
    compute = None
    if isinstance(state.get("estimates"), dict):
        state, compute = state["estimates"], state.get("compute")
    if "engine" not in state:
        raise CorruptError(f"{path} holds no estimates of an engine; name what kvwire plan --json printed")
    return {"estimates": state} if compute is None else {"estimates": state, "compute": _checked(compute, path)}


def _checked(compute: object, path: Path) -> dict[str, int]:
    """Lanes and batches of an engine."""
    if isinstance(compute, dict) and compute.keys() == COMPUTE.keys():
        found = {name: value for name, value in compute.items() if type(value) is int}
        if len(found) == len(COMPUTE) and all(1 <= found[name] <= most for name, most in COMPUTE.items()):
            return found
    msg = f"{path}: compute must hold {', '.join(COMPUTE)}, as kvwire plan --json printed them; print it anew"
    raise CorruptError(msg)
