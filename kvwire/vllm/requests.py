"""What a request to vLLM says of documents, and the salt that keeps its cache apart from all others."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvwire.controller import Goal, Objective
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry

PARAMS = "kvwire"
"""Name of the parameters in ``kv_transfer_params``."""
_MODE = "documents"
_NAMES = {"documents", "level", "deadline_s", "objective"}
_OBJECTIVES = ("earliest", "quality", "cheapest")
_MOST = 4096  # documents
_LONGEST_S = 86400.0


@dataclass(frozen=True)
class Choice:
    """Which documents stand at a prompt's beginning, and how they are to be loaded.

    Attributes:
        documents: Ids, in the prompt's order.
        level: The quality level of all chunks; None: as the link allows.
        deadline_s: Seconds after the request's arrival at which loading ends; None: none.
        objective: See ``controller.Goal``; None: the best quality within the deadline.
    """

    documents: tuple[str, ...]
    level: int | None = None
    deadline_s: float | None = None
    objective: Objective | None = None

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
            msg = f"kv_transfer_params: {PARAMS!r} is an object of documents and one of level, deadline_s and objective"
            raise ArgumentError(msg)
        names, level, deadline = params.get("documents"), params.get("level"), params.get("deadline_s")
        objective: Any = params.get("objective")
        if not (isinstance(names, list) and 0 < len(names) <= _MOST and all(isinstance(n, str) and n for n in names)):
            msg = f"documents is a list of 1 to {_MOST} ids of documents"
            raise ArgumentError(msg)
        if level is not None and (type(level) is not int or not 0 <= level < 1 << 8):
            msg = f"level is a whole number from 0, got {str(level)[:40]}"
            raise ArgumentError(msg)
        if deadline is not None and (type(deadline) not in (int, float) or not 0 < deadline <= _LONGEST_S):
            msg = f"deadline_s is a number of seconds above 0, at most {_LONGEST_S:g}, got {str(deadline)[:40]}"
            raise ArgumentError(msg)
        if objective is not None and objective not in _OBJECTIVES:
            msg = f"objective is one of {', '.join(_OBJECTIVES)}, got {str(objective)[:40]}"
            raise ArgumentError(msg)
        if level is None and deadline is None and objective != "earliest":
            msg = "say how good the documents' caches must be: level, deadline_s, or objective earliest"
            raise ArgumentError(msg)
        return cls(tuple(names), level, None if deadline is None else float(deadline), objective)

    def goal(self, left_s: float | None) -> Goal:
        """What the controller is to reach.

        Args:
            left_s: Seconds that are left of the deadline; None: there is none.
        """
        from kvwire.controller import Goal

        usual: Objective = "earliest" if left_s is None else "quality"
        return Goal(objective=self.objective or usual, deadline_s=left_s, floor=self.level or 0, ceiling=self.level)

    def params(self) -> dict[str, Any]:
        """What a client sends; ``read`` takes it."""
        chosen = {"level": self.level, "deadline_s": self.deadline_s, "objective": self.objective}
        return {"documents": list(self.documents)} | {k: v for k, v in chosen.items() if v is not None}


def salt_of(choice: Choice, tenant: str, config_digest: str, entries: Sequence[CatalogEntry | None]) -> str:
    """The ``cache_salt`` of a request: no other request shares its cache in vLLM's memory.

    Args:
        choice: The request's.
        tenant: Hash of the tenant.
        config_digest: Of the model.
        entries: What the catalog has of each document; None where it has nothing.

    Returns:
        Text that begins with mode and level and ends with a digest of all: tenant, model, choice, and each document's
        blob, text and profile.
    """
    named = [
        [name, *((entry.sha256, entry.token_digest, entry.profile_digest) if entry else ("", "", ""))]
        for name, entry in zip(choice.documents, entries, strict=True)
    ]
    told = {"mode": _MODE, "tenant": tenant, "config": config_digest, "choice": choice.params(), "documents": named}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    quality = f"level-{choice.level}" if choice.level is not None else "adaptive"
    profile = next((entry.profile_digest[:12] for entry in entries if entry and entry.profile_digest), "none")
    return f"kvwire-{_MODE}-{quality}-profile-{profile}-{digest[:32]}"


def entries_of(corpus: Corpus, choice: Choice) -> list[CatalogEntry | None]:
    """Look the documents up; None for one that is not in the catalog.

    Args:
        corpus: The documents'.
        choice: The request's.

    Returns:
        Their entries, in order.

    Raises:
        KvwireError: The catalog cannot be read.
    """
    return [_entry(corpus, name) for name in choice.documents]


def _entry(corpus: Corpus, name: str) -> CatalogEntry | None:
    try:
        return corpus.find(name)
    except NotFoundError:
        return None


def request_salt(corpus: Corpus, choice: Choice) -> str:
    """The salt of a request for documents of a corpus.

    Args:
        corpus: The documents'.
        choice: The request's.

    Returns:
        See ``salt_of``.

    Raises:
        NotFoundError: A document is not in the catalog.
    """
    entries = [corpus.find(name) for name in choice.documents]
    return salt_of(choice, corpus.catalog.tenant, corpus.meta.config_digest(), entries)


def request_body(corpus: Corpus, choice: Choice, question: Sequence[int], **more: object) -> dict[str, object]:
    """The body of a request to ``/v1/completions`` of a vLLM that runs with kvwire's connector.

    Args:
        corpus: The documents', with or without an engine.
        choice: Which documents, and how.
        question: Token ids that follow the documents.
        **more: Further fields: ``model``, ``max_tokens``, ``temperature`` and so on.

    Returns:
        Fields for JSON: the documents' and the question's token ids as ``prompt``, ``cache_salt`` and
        ``kv_transfer_params``.

    Raises:
        NotFoundError: A document is not in the catalog, or its text is lost.
        ArgumentError: The question has no tokens.
    """
    if not question:
        msg = "a question has at least one token"
        raise ArgumentError(msg)
    prompt = [token for name in choice.documents for token in corpus.text(corpus.find(name))]
    fields: Mapping[str, object] = {
        "prompt": [*prompt, *question],
        "cache_salt": request_salt(corpus, choice),
        "kv_transfer_params": {PARAMS: choice.params()},
    }
    return {**more, **fields}
