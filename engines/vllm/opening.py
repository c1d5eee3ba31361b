"""What a connector is configured with: a store, a tenant, and how documents are loaded."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire.controller import MAX_KL
from kvwire.engines.transformers.identity import model_revision
from kvwire.errors import ArgumentError
from kvwire.runtime.adapters import CorpusSettings
from kvwire.runtime.settings import LoadSettings, check_max_kl
from kvwire.store import hash_scheme
from kvwire.transport import parse_link

from .loading import PageLoader
from .proxy.outcome_socket import check_path

if TYPE_CHECKING:
    import torch

    from kvwire.runtime.corpus import Corpus
    from kvwire.transport import LinkSettings

    from .save_scheduling import SaveMode

_TEXTS = (
    "store", "model", "token", "tenant", "salt", "keys", "cache", "cache_size", "memory_size", "link", "index", "save",
    "outcomes",
)  # fmt: skip
_LONGEST_S = 86400.0
_OLDEST, _TESTED = (0, 32), (0, 32)
"""Versions of vLLM: the first whose connectors can do what this one does, and the last that it was tested inside."""
_LOG = logging.getLogger("kvwire.vllm")
_SAVE = ("off", "asked", "all", "named")


def check_version(version: str) -> None:
    """Refuse a vLLM that is too old, and warn of one that is newer than those tested."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else _TESTED  # a build from source may have no number
    if found < _OLDEST:
        msg = f"this is vLLM {version}, the connector needs {_OLDEST[0]}.{_OLDEST[1]} or later: pip install -U vllm"
        raise ArgumentError(msg)
    if found > _TESTED:
        _LOG.warning("this is vLLM %s, kvwire was tested inside %d.%d", version, *_TESTED)


def log_as_vllm() -> None:
    """Have kvwire's lines written as vLLM's, with time, level and process, unless they go elsewhere already."""
    ours, theirs = logging.getLogger("kvwire"), logging.getLogger("vllm")
    if theirs.handlers and not ours.hasHandlers():
        ours.handlers[:] = theirs.handlers
        ours.setLevel(theirs.level)


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings(CorpusSettings):
    """vLLM's ``kv_connector_extra_config``, what names the corpus included; without a model it is vLLM's own folder."""

    link: str | None = None  # an emulated link, such as ``50mbit,20ms``, for measurements
    patience_s: float = 5.0  # longest wait for the catalog
    load_s: float = 30.0  # longest load without a deadline
    pause_s: float = 10.0  # how long a store that failed three times in a row is left alone; 0: it is always asked
    max_kl: float | None = MAX_KL  # see ``LoadSettings``; null: any level. A request that names a level gets that
    # of what documents tell a question, the share that links may lose by ``kvwire check-model``; else only the first
    # of linked documents is loaded. null: any
    link_bound: float | None = None
    index: str = "kvwire"  # by which the longest stored prefix of a prompt is found, as ``Corpus.index`` takes it
    save: SaveMode = "off"  # which prompts are kept that vLLM computes; see ``SaveScheduler``
    # path of the socket at which a proxy is told what became of requests (``kvwire vllm-proxy``)
    outcomes: str | None = None

    @classmethod
    def read(cls, extra: dict[str, Any]) -> ConnectorSettings:
        """Read what vLLM was started with."""
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(set(extra) - known):
            msg = f"kv_connector_extra_config has no {unknown[0]!r}; it may have {', '.join(sorted(known))}"
            raise ArgumentError(msg)
        if wrong := [name for name in _TEXTS if extra.get(name) is not None and not isinstance(extra[name], str)]:
            raise ArgumentError(f"kv_connector_extra_config: {wrong[0]} is a text")
        for name, least in (("patience_s", 1e-3), ("load_s", 1e-3), ("pause_s", 0)):
            seconds = extra.get(name, 1.0)
            if type(seconds) not in (int, float) or not least <= seconds <= _LONGEST_S:
                msg = f"kv_connector_extra_config: {name} is a number of seconds {'above' if least else 'from'} 0"
                raise ArgumentError(msg)
        if extra.get("save", "off") not in _SAVE:
            raise ArgumentError(f"kv_connector_extra_config: save is one of {', '.join(_SAVE)}")
        if extra.get("outcomes") is not None:
            check_path(extra["outcomes"])
        check_max_kl(extra.get("max_kl"))
        bound = extra.get("link_bound")
        if bound is not None and (type(bound) not in (int, float) or not 0 <= bound <= 1):
            raise ArgumentError("kv_connector_extra_config: link_bound is a share from 0 to 1")
        hash_scheme(extra.get("index") or "kvwire", "")
        if not extra.get("store"):
            msg = 'name the store of the documents: "kv_connector_extra_config": {"store": "file:///folder"}'
            raise ArgumentError(msg)
        return cls(**extra)

    def corpus(self, model: str) -> Corpus:
        """Open the documents' corpus, without an engine."""
        folder = Path(model).expanduser()
        named = model_revision(folder) if not self.model and (folder / "config.json").is_file() else self.model
        return self.open_corpus(named or model)

    def loader(self, corpus: Corpus, dtype: torch.dtype) -> PageLoader:
        """What loads documents."""
        link: LinkSettings | None = parse_link(self.link) if self.link else None
        settings = LoadSettings(open_s=self.patience_s, patience_s=self.load_s, max_kl=self.max_kl)
        return PageLoader(corpus, dtype, link=link, settings=settings)
