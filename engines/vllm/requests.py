"""What a request to vLLM says of documents, and the salt that keeps its cache apart from all others."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.runtime.kept import bases
from kvwire.store import check_new_name, read_ahead
from kvwire.store.prefix.index import opening_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvwire.controller import Goal, Objective
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry, KeptRepair

PARAMS = "kvwire"
"""Name of the parameters in ``kv_transfer_params``."""
SALTED = "kvwire-"
"""What the salts of all caches begin with that may hold loaded rows."""
OWN = "+"
"""Stands in a salt before what a client adds, whose requests then share their rows with none without it."""
KEPT = "kept"
"""The one repair that vLLM can serve: rows that an earlier load computed and kept."""
_NAMES = {"documents", "prefix", "level", "deadline_s", "objective", "save", "repair", "head", "soon"}
_OBJECTIVES = ("earliest", "quality", "cheapest")
_MOST = 4096  # documents
_LONGEST_S = 86400.0
_LONGEST_HEAD = 1 << 20


@dataclass(frozen=True)
class Choice:
    """What a prompt begins with, and how that is to be loaded.

    Attributes:
        documents: Ids of linked documents at the prompt's beginning, in its order.
        level: The quality level of all chunks; None: as the link allows.
        deadline_s: Seconds after the request's arrival at which loading ends; None: none.
        objective: See ``controller.Goal``; None: the best quality within the deadline.
        prefix: Load the longest prefix of the prompt that the corpus's index knows.
        save: Keep what vLLM computes of the prompt, for later requests for prefixes; a name: as the document of that
            name, where vLLM was started for that.
        head: So many tokens stand before the documents, a chat template's, whose rows the store has; or before the
            document that is saved under a name: BOS, which is no part of it.
        repair: ``kept``: lay the rows that an earlier load repaired, and kept, over the documents; empty: none.
        prefetch: Ids of documents to fetch into the worker's cache for later requests; clients say ``soon``.
    """

    documents: tuple[str, ...] = ()
    level: int | None = None
    deadline_s: float | None = None
    objective: Objective | None = None
    prefix: bool = False
    save: bool | str = False
    repair: str = ""
    head: int = 0
    prefetch: tuple[str, ...] = ()

    @classmethod
    def read(cls, params: object) -> Choice:
        """Read what a client sent.

        Args:
            params: The value of ``kvwire`` in ``kv_transfer_params``.

        Returns:
            The choice.

        Raises:
            ArgumentError: It is none; the message says what is wrong.
        """
        if not isinstance(params, dict) or not set(params) <= _NAMES:
            unknown = sorted(map(str, set(params) - _NAMES))[:1] if isinstance(params, dict) else []
            raise ArgumentError(
                f"kv_transfer_params: {PARAMS!r} is an object of documents or prefix, one of level, deadline_s and "
                "objective, and perhaps save, repair or soon"
                + (f"; {unknown[0][:40]!r} is none of these" if unknown else "")
            )
        names, (prefix, save) = params.get("documents"), _flags(params)
        prefetch = params.get("soon")
        for name, ids in (("documents", names), ("soon", prefetch)):
            if ids is not None and not _are_ids(ids):
                raise ArgumentError(f"{name} is a list of 1 to {_MOST} ids of documents")
        if names and (prefix or save):
            msg = "a request names documents or asks for its longest prefix, not both, and linked rows are never saved"
            raise ArgumentError(msg)
        level, deadline, objective = _quality(params)
        if not (names or prefix or save or prefetch):
            raise ArgumentError(f"documents is a list of 1 to {_MOST} ids of documents; else prefix or save is true")
        if (names or prefix) and level is None and deadline is None and objective != "earliest":
            raise ArgumentError("say how good the documents' caches must be: level, deadline_s, or objective earliest")
        if params.get("repair") is not None:
            _check_repair(params["repair"], names or (), level)
        head = params.get("head", 0)
        if type(head) is not int or not 0 <= head <= _LONGEST_HEAD or (head and not (names or isinstance(save, str))):
            msg = f"head is how many tokens stand before the documents, at most {_LONGEST_HEAD}, got {str(head)[:40]}"
            raise ArgumentError(msg)
        return cls(
            tuple(names or ()), level, deadline, objective, prefix, save, params.get("repair") or "", head,
            tuple(prefetch or ()),
        )  # fmt: skip

    @property
    def mode(self) -> str:
        """What is loaded: ``documents``, ``prefix``, or nothing."""
        return "documents" if self.documents else "prefix" if self.prefix else ""

    def goal(self, left_s: float | None) -> Goal:
        """What the controller is to reach.

        Args:
            left_s: Seconds until the deadline; None: there is none.

        Returns:
            The goal of a load.
        """
        from kvwire.controller import Goal

        usual: Objective = "earliest" if left_s is None else "quality"
        return Goal(objective=self.objective or usual, deadline_s=left_s, floor=self.level or 0, ceiling=self.level)

    def params(self) -> dict[str, Any]:
        """What a client sends; ``read`` takes it."""
        chosen = {"level": self.level, "deadline_s": self.deadline_s, "objective": self.objective}
        flags: dict[str, Any] = {"documents": list(self.documents), "prefix": self.prefix, "save": self.save}
        flags |= {"repair": self.repair, "head": self.head, "soon": list(self.prefetch)}
        return {k: v for k, v in flags.items() if v} | {k: v for k, v in chosen.items() if v is not None}


def _are_ids(names: object) -> bool:
    return isinstance(names, list) and 0 < len(names) <= _MOST and all(isinstance(n, str) and n for n in names)


def _flags(params: Mapping[str, object]) -> tuple[bool, bool | str]:
    prefix, save = params.get("prefix", False), params.get("save", False)
    if not (isinstance(prefix, bool) and isinstance(save, bool | str)):
        raise ArgumentError("prefix and save are true or false; save may be the name of a document, too")
    return prefix, check_new_name(save, "document") if isinstance(save, str) else save


def _check_repair(repair: object, names: Sequence[str], level: int | None) -> None:
    """Refuse repairs that vLLM cannot serve."""
    if repair != KEPT:
        msg = f'repair is "{KEPT}", or left out: vLLM computes no single rows of its own; docs/vllm.md says what it can'
        raise ArgumentError(msg)
    if len(names) < 2 or level is None:  # noqa: PLR2004
        raise ArgumentError("a repair is of two documents at least, and needs a level: which rows fit depends on it")


def _quality(params: Mapping[str, Any]) -> tuple[int | None, float | None, Objective | None]:
    level, deadline, objective = params.get("level"), params.get("deadline_s"), params.get("objective")
    if level is not None and (type(level) is not int or not 0 <= level < 1 << 8):
        raise ArgumentError(f"level is a whole number from 0, got {str(level)[:40]}")
    if deadline is not None and (type(deadline) not in (int, float) or not 0 < deadline <= _LONGEST_S):
        msg = f"deadline_s is a number of seconds above 0, at most {_LONGEST_S:g}, got {str(deadline)[:40]}"
        raise ArgumentError(msg)
    if objective is not None and objective not in _OBJECTIVES:
        raise ArgumentError(f"objective is one of {', '.join(_OBJECTIVES)}, got {str(objective)[:40]}")
    return level, None if deadline is None else float(deadline), objective


def salt_of(
    choice: Choice, tenant: str, config_digest: str, entries: Sequence[CatalogEntry | None], profile: str = "",
    kept: KeptRepair | None = None,
) -> str:  # fmt: skip
    """The ``cache_salt`` of a request: no other request shares its cache in vLLM's memory."""
    choice = replace(choice, save=False, prefetch=())  # what is done for later requests changes no cache
    named = [
        [name, *((entry.sha256, entry.token_digest, entry.profile_digest) if entry else ("", "", ""))]
        for name, entry in zip(choice.documents, entries, strict=True)
    ]
    told = {
        "mode": choice.mode, "tenant": tenant, "config": config_digest, "choice": choice.params(), "documents": named,
    } | ({"profile": profile} if choice.prefix else {})  # fmt: skip
    if choice.repair:
        told["kept"] = kept.to_json().decode() if kept else ""
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    quality = f"level-{choice.level}" if choice.level is not None else "adaptive"
    profile = next((entry.profile_digest for entry in entries if entry and entry.profile_digest), profile)
    return f"{SALTED}{choice.mode}-{quality}-profile-{profile[:12] or 'none'}-{digest[:32]}"


def entries_of(corpus: Corpus, names: Iterable[str]) -> list[CatalogEntry | None]:
    """Look documents up, several at a time where the store is far; None for one that is not in the catalog."""
    reads = read_ahead(corpus.catalog.store, names, partial(_entry, corpus))
    entries = [read() for _, read in reads]
    if None in entries:
        _check_record(corpus)
    return entries


def _check_record(corpus: Corpus) -> None:
    """Raise StorageError where the store is away, unmounted or emptied: then nothing in particular is missing."""
    if corpus.catalog.models.get(corpus.meta.config_digest()) is None:
        msg = f"{corpus.catalog.store.url} no longer has the record of this model: mount it again, or encode documents"
        raise StorageError(msg)


def _entry(corpus: Corpus, name: str) -> CatalogEntry | None:
    try:
        return corpus.find(name)
    except NotFoundError:
        return None


def kept_of(
    corpus: Corpus, choice: Choice, entries: Sequence[CatalogEntry | None], prompt: Sequence[int]
) -> KeptRepair | None:
    """The repaired rows that a request is to get, behind the tokens that its prompt has before the documents."""
    if not choice.repair:
        return None
    there = [entry for entry in takewhile(lambda entry: entry is not None, entries) if entry]
    known = [(entry.token_digest, None if entry.is_text else corpus.read_header(entry)) for entry in there]
    opening = next((opening_of(info) for _, info in known if info is not None), ())
    head = tuple(prompt[: choice.head]) if choice.head else opening
    least = 2 if head == opening else 1
    kept = corpus.catalog.kept.find(corpus.meta.config_digest(), bases(known, opening, head), least)
    return kept if kept is not None and kept.level >= (choice.level or 0) else None


def missing_level(entries: Iterable[CatalogEntry | None], level: int | None) -> str:
    """Which document cannot be loaded at a level, in words; empty where all can."""
    for entry in entries:
        if level is not None and entry is not None and not entry.is_text and level >= len(entry.levels):
            there = ", ".join(f"{number} ({name})" for number, (name, _) in enumerate(entry.levels))
            return f"document {entry.document_id!r} has no level {level}, but {there}: ask for one of these"
    return ""


def request_salt(corpus: Corpus, choice: Choice, prompt: Sequence[int] = ()) -> str:
    """The ``cache_salt`` of a request for documents of a corpus.

    Args:
        corpus: The documents'.
        choice: The request's.
        prompt: Its token ids; needed where a repair is asked for and tokens stand before the documents.

    Returns:
        The salt, to be sent as ``cache_salt``.

    Raises:
        NotFoundError: A document is not in the catalog, or a repair is asked for and none is kept.
        ArgumentError: A document has no such level.
        StorageError: A prefix is asked for, and the store no longer has the model's record.
    """
    entries = [corpus.find(name) for name in choice.documents]
    if missing := missing_level(entries, choice.level):
        raise ArgumentError(missing)
    profile = current_profile_digest(corpus) if choice.prefix else ""
    kept = kept_of(corpus, choice, entries, prompt)
    if choice.repair and kept is None:
        raise NotFoundError(
            f"no repair of these documents in this order is kept that fits level {choice.level}: let kvwire ask "
            f"--floor {choice.level} --repair 0.15 --keep-repairs compute one, or ask without a repair"
        )
    return salt_of(choice, corpus.catalog.tenant, corpus.meta.config_digest(), entries, profile, kept)


def current_profile_digest(corpus: Corpus) -> str:
    """Digest of the profile that a corpus encodes with; empty where it has none yet."""
    found = corpus.catalog.profiles.current(corpus.meta.config_digest())
    if found is None:
        _check_record(corpus)
    return found or ""


def _opening(corpus: Corpus, documents: Sequence[CatalogEntry]) -> tuple[int, ...]:
    """The BOS that a prompt of documents begins with: what the first one was computed behind."""
    return () if not documents or documents[0].is_text else opening_of(corpus.read_header(documents[0]))


def no_head(tokens: int) -> str:
    """That a chat's head is not in the store, in words."""
    return (
        f"the store lacks the rows of the {tokens} tokens before the documents: run kvwire encode --chat once with the "
        "same --system and --before; they are computed"
    )


def request_body(
    corpus: Corpus, choice: Choice, question: Sequence[int], *, computed: Sequence[str] = (), **more: object
) -> dict[str, object]:
    """The body of a request to ``/v1/completions`` of a vLLM that runs with kvwire's connector.

    Args:
        corpus: The documents', with or without an engine.
        choice: Which documents, or the longest prefix, and how.
        question: Token ids that follow the documents; without documents, the whole prompt.
        computed: Further documents, behind those of the choice, whose texts vLLM computes: in view of all before them.
        **more: Further fields: ``model``, ``max_tokens``, ``temperature`` and so on.

    Returns:
        Fields for JSON: as ``prompt`` the token ids of the BOS that the first document was computed behind, of the
        documents and of the question, ``cache_salt`` where anything may be loaded, and ``kv_transfer_params``.

    Raises:
        NotFoundError: A document is not in the catalog, or its text is lost.
        ArgumentError: The question has no tokens.
    """
    if not question:
        raise ArgumentError("a question has at least one token")
    found = [corpus.find(name) for name in (*choice.documents, *computed)]
    prompt = [*_opening(corpus, found), *(token for entry in found for token in corpus.text(entry)), *question]
    return body_of(corpus, choice, prompt, more)


def with_own(salt: str, own: object) -> str:
    """A salt of kvwire's, and what a client adds to it."""
    if own and not isinstance(own, str):
        raise ArgumentError("cache_salt is a text")
    return f"{salt}{OWN}{own}" if own else salt


def body_of(corpus: Corpus, choice: Choice, prompt: list[int], more: Mapping[str, object]) -> dict[str, object]:
    """The body of a request with this prompt."""
    own = more.get("cache_salt")
    salted = {"cache_salt": with_own(request_salt(corpus, choice, prompt), own)} if choice.mode else {}
    fields: Mapping[str, object] = {"prompt": prompt, "kv_transfer_params": {PARAMS: choice.params()}}
    return {**more, **fields, **salted}
