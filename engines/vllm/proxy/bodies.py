"""What becomes of a request that names documents: the body that vLLM gets. Blocks; threads may call it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvwire.engines.transformers.chat import Script, read_around, render_template
from kvwire.errors import ArgumentError, KvwireError, NotFoundError
from kvwire.runtime.combinations import Combination
from kvwire.store.recent import Recent

from ..requests import KEPT, PARAMS, SALTED, Choice, entries_of, kept_of, missing_level, request_salt, salt_of, with_own
from .placeholders import (
    RequestError,
    cut,
    filled,
    flattened,
    for_template,
    names_in,
    placeholder,
    template_options,
    texts_of,
    tools_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvwire.engines.transformers.tokenizing import PieceTokenizer
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry, UseCounts

    from .placeholders import Cut

Kind: TypeAlias = Literal["documents", "prefix", "plain"]
Load: TypeAlias = Literal["linked", "first", "kept"]
_LOG = logging.getLogger("kvwire.proxy")
_MOST_TOKENS = 1 << 22
"""Of documents whose texts are remembered: about 40 bytes each."""
_QUALITY = ("level", "deadline_s", "objective")


@dataclass(frozen=True)
class Wanted:
    """How documents are loaded where a request does not say.

    Attributes:
        level: See ``Choice``.
        deadline_s: See ``Choice``.
        objective: See ``Choice``; ``earliest`` where nothing else is said.
        load: ``linked``: all documents that follow one another; ``first``: the first alone, vLLM computes the others in
            its view; ``kept``: as far as repaired rows of them are kept, else the first alone.
        prefix: Requests without documents ask for their longest stored prefix.
        save: These also have their prompts and answers kept.
    """

    level: int | None = None
    deadline_s: float | None = None
    objective: str | None = None
    load: Load = "linked"
    prefix: bool = False
    save: bool = False

    def __post_init__(self) -> None:
        """Refuse what no request can ask for."""
        if self.load == KEPT and self.level is None:
            raise ArgumentError("repaired rows are of a level: give --level with --load kept")
        if self.save and not self.prefix:
            raise ArgumentError("what is saved is found as a prefix: give --prefix with --save")
        Choice.read({"documents": ["a"]} | self.quality)

    @property
    def quality(self) -> dict[str, Any]:
        """Fields of a request."""
        given = {name: getattr(self, name) for name in _QUALITY if getattr(self, name) is not None}
        return given or {"objective": "earliest"}


@dataclass(frozen=True)
class Prepared:
    """A body for vLLM."""

    body: dict[str, Any]  # its fields
    kind: Kind = "plain"  # what it asks for
    documents: tuple[str, ...] = ()  # ids of the documents that are to be loaded


@dataclass(frozen=True)
class _Text:
    token_ids: tuple[int, ...]
    text: str


@dataclass(eq=False)
class _Named:
    """Documents of a request, each looked up once."""

    entries: dict[str, CatalogEntry]
    texts: dict[str, _Text] = field(default_factory=dict)


class BodyMaker:
    """Makes bodies of requests with one corpus and one model's tokenizer."""

    def __init__(
        self, corpus: Corpus, pieces: PieceTokenizer, wanted: Wanted | None = None,
        combinations: UseCounts | None = None,
    ) -> None:  # fmt: skip
        """Read nothing yet.

        combinations: where is counted which documents were linked; ``kvwire repair`` repairs those that were often, and
        requests then get their rows.
        """
        self._corpus, self._pieces, self._wanted = corpus, pieces, wanted or Wanted()
        self._combinations = combinations
        self._texts: Recent[str, _Text] = Recent(_MOST_TOKENS, lambda found: len(found.token_ids))

    def prepare(self, body: dict[str, Any], *, is_chat: bool) -> Prepared:
        """Make the body; what names no documents stays as it is, but for a prefix."""
        params = body.get("kv_transfer_params")
        asked = params.get(PARAMS) if isinstance(params, dict) else None
        if params is not None and not isinstance(params, dict):
            raise RequestError("kv_transfer_params is an object", param="kv_transfer_params")
        if asked is not None and not isinstance(asked, dict):
            raise RequestError(f"kv_transfer_params.{PARAMS} is an object", param="kv_transfer_params")
        if asked and str(body.get("cache_salt") or "").startswith(SALTED):
            mode: Kind = "prefix" if asked.get("prefix") else "documents"
            return Prepared(body, mode)  # made by kvwire salt or request_body
        body, asked = self._placed(dict(body), dict(asked or {}), is_chat=is_chat)
        texts = texts_of(body.get("messages")) if is_chat else [body.get("prompt")]
        names = [name for text in texts if isinstance(text, str) for name in names_in(text)]
        if not names and not is_chat and isinstance(texts[0], list):
            names = [name for each in texts[0] if isinstance(each, str) for name in names_in(each)]
            if names:
                raise RequestError("a prompt with documents is one text", param="prompt")
        if not names:
            return self._prefixed(body, asked)
        named = _Named(self._found(list(dict.fromkeys(names))))
        made, choice = (self._chat if is_chat else self._prompt)(body, asked, named)
        return Prepared(made, "documents", choice.documents)

    def _placed(
        self, body: dict[str, Any], asked: dict[str, Any], *, is_chat: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Put placeholders where a request names its documents beside its texts."""
        names, place = asked.pop("documents", None), asked.pop("place", None)
        if names is None:
            return body, asked
        if not isinstance(names, list) or not names or not all(isinstance(each, str) and each for each in names):
            raise RequestError("documents is a list of ids", param=f"kv_transfer_params.{PARAMS}.documents")
        marks = "".join(map(placeholder, names))
        if not is_chat:
            if not isinstance(body.get("prompt"), str):
                raise RequestError("a prompt with documents is one text", param="prompt")
            return body | {"prompt": marks + body["prompt"]}, asked
        messages = flattened(body.get("messages") or ())
        users = [number for number, message in enumerate(messages) if message["role"] == "user"]
        at = (users or [-1])[-1] if place is None else place
        if type(at) is not int or not 0 <= at < len(messages):
            msg = "place is the number of the message that documents begin; without it, the user's last one"
            raise RequestError(msg, param=f"kv_transfer_params.{PARAMS}.place")
        messages[at] |= {"content": marks + (messages[at]["content"] or "")}
        return body | {"messages": messages}, asked

    def _prefixed(self, body: dict[str, Any], asked: dict[str, Any]) -> Prepared:
        """A request without documents: as it is, or for its longest stored prefix."""
        given = dict(body.get("kv_transfer_params") or {})
        if asked or (self._wanted.prefix and not given):
            more: dict[str, Any] = {} if asked else {"prefix": True} | ({"save": True} if self._wanted.save else {})
            choice = self._read(asked | more)
            made = body | {"kv_transfer_params": given | {PARAMS: choice.params()}}
            if choice.mode != "prefix":
                return Prepared(made)
            try:
                salt = request_salt(self._corpus, choice)
            except KvwireError as error:  # vLLM computes all of it, and its answer says why
                _LOG.warning("a request is served without its prefix: %s", error)
                return Prepared(made, "prefix")
            return Prepared(made | {"cache_salt": self._salted(body, salt)}, "prefix")
        return Prepared(body)

    def _read(self, asked: Mapping[str, Any]) -> Choice:
        """A request's own words, and the proxy's for what they leave out."""
        said = {name: value for name, value in asked.items() if name != "load"}
        if not any(name in said for name in _QUALITY) and (said.get("documents") or said.get("prefix")):
            said |= self._wanted.quality
        try:
            return Choice.read(said)
        except ArgumentError as error:
            raise RequestError(str(error), param="kv_transfer_params") from error

    def _chat(self, body: dict[str, Any], asked: dict[str, Any], named: _Named) -> tuple[dict[str, Any], Choice]:
        """The documents' texts stand in the messages, so that vLLM does all that it does with chats."""
        messages = flattened(body["messages"])
        for name in named.entries:
            if self._pieces.spells_control(self._text(named, name).text):
                msg = (
                    f"document {name!r} spells control tokens, which a chat's text would turn into such: send it to "
                    "/v1/completions, which gets its tokens"
                )
                raise RequestError(msg, code="control_tokens", param="messages")
        at = next(number for number, each in enumerate(messages) if names_in(each["content"] or ""))
        text_of = lambda name: self._text(named, name).text  # noqa: E731 - handed on
        found, choice = self._chosen(cut(messages[at]["content"]), asked)
        contents = [filled(each["content"] or "", text_of) for each in messages]
        before, after = found.before, filled(found.after, text_of)
        contents[at] = before + "".join(map(text_of, found.documents)) + after
        shown, options, tools = for_template(messages), template_options(body), tools_of(body)
        said = [*contents[:at], before, after, *contents[at + 1 :]]

        def write(texts: Sequence[str], mark: str) -> str:
            inside = [*texts[:at], texts[at] + mark + texts[at + 1], *texts[at + 2 :]]
            told = [message | {"content": text} for message, text in zip(shown, inside, strict=True)]
            try:
                return render_template(self._pieces.tokenizer, told, tools=tools, **options)
            except Exception as error:  # a template raises whatever it likes
                raise RequestError(f"the model's chat template refuses this chat: {error}", param="messages") from error

        if not self._pieces.tokenizer.chat_template:
            raise RequestError("the model has no chat template: send its prompt to /v1/completions")
        trouble = "the model's chat template has the message with documents {} times, and they are linked once"
        head, _ = self._around(Script(tuple(said), write, trouble))
        given = [
            message if (message["content"] or "") == text else message | {"content": text}
            for message, text in zip(messages, contents, strict=True)
        ]
        return self._with(body | {"messages": given}, replace(choice, head=len(head)), named, head), choice

    def _prompt(self, body: dict[str, Any], asked: dict[str, Any], named: _Named) -> tuple[dict[str, Any], Choice]:
        """The documents' own tokens, whatever they spell."""
        found, choice = self._chosen(cut(body["prompt"]), asked)
        rest = filled(found.after, lambda name: self._text(named, name).text)
        script = Script((), lambda _, mark: f"{found.before}{mark}{rest}", "")
        head, tail = self._around(script)
        if not body.get("add_special_tokens", True):
            head = head[len(self._pieces.opening) :]
        ids = [token for name in found.documents for token in self._text(named, name).token_ids]
        made = body | {"prompt": [*head, *ids, *tail]}
        return self._with(made, replace(choice, head=len(head)), named, head), choice

    def _around(self, script: Script) -> tuple[tuple[int, ...], tuple[int, ...]]:
        try:
            return read_around(self._pieces, script)
        except ArgumentError as error:
            raise RequestError(str(error), param="messages") from error

    def _chosen(self, found: Cut, asked: Mapping[str, Any]) -> tuple[Cut, Choice]:
        """Which of the documents that follow one another are loaded, and how; the others become text."""
        load = asked.get("load", self._wanted.load)
        if load not in ("linked", "first", KEPT):
            raise RequestError(f"load is linked, first or {KEPT}", param=f"kv_transfer_params.{PARAMS}.load")
        said = dict(asked)
        if load == "first":
            others = "".join(map(placeholder, found.documents[1:]))
            found = replace(found, documents=found.documents[:1], after=others + found.after)
        elif load == KEPT and len(found.documents) > 1:
            said.setdefault("repair", KEPT)
        return found, self._read(said | {"documents": list(found.documents)})

    def _with(self, body: dict[str, Any], choice: Choice, named: _Named, head: tuple[int, ...]) -> dict[str, Any]:
        """What the connector must be told."""
        entries = [named.entries[name] for name in choice.documents]
        if missing := missing_level(entries, choice.level):
            raise RequestError(missing, code="no_such_level", param="kv_transfer_params")
        kept = kept_of(self._corpus, choice, entries, head)
        if self._combinations is not None and len(entries) > 1:
            self._combinations.add(self._corpus.scope, Combination(choice.documents, head).to_json())
            if not choice.repair and choice.level is not None:  # rows that were repaired meanwhile serve, where all are
                better = replace(choice, repair=KEPT)
                kept = kept_of(self._corpus, better, entries, head)
                whole = kept is not None and len(kept.documents) == len(entries)
                choice, kept = (better, kept) if whole else (choice, None)
        config, tenant = self._corpus.meta.config_digest(), self._corpus.catalog.tenant
        salt = self._salted(body, salt_of(choice, tenant, config, entries, kept=kept))
        given = body.get("kv_transfer_params") or {}
        return body | {"cache_salt": salt, "kv_transfer_params": {**given, PARAMS: choice.params()}}

    @staticmethod
    def _salted(body: Mapping[str, Any], salt: str) -> str:
        """A salt of kvwire's, and the client's own."""
        try:
            return with_own(salt, body.get("cache_salt"))
        except ArgumentError as error:
            raise RequestError(str(error), param="cache_salt") from error

    def _found(self, names: Sequence[str]) -> dict[str, CatalogEntry]:
        """Look documents up."""
        found = {}
        for name, entry in zip(names, entries_of(self._corpus, names), strict=True):
            if entry is None:
                msg = f"document {name!r} is not in the catalog: encode it, or leave it out"
                raise RequestError(msg, 404, "document_not_found", name)
            found[name] = entry
        return found

    def _text(self, named: _Named, name: str) -> _Text:
        """A document's tokens and text; those of many documents are remembered, by their digests."""
        if (found := named.texts.get(name)) is not None:
            return found
        entry = named.entries[name]
        if (found := self._texts.get(entry.token_digest)) is None:
            try:
                ids = tuple(self._corpus.text(entry))
            except NotFoundError as error:
                msg = f"the text of document {name!r} is lost: encode it again"
                raise RequestError(msg, 404, "document_not_found", name) from error
            text = str(self._pieces.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
            found = self._texts.put(entry.token_digest, _Text(ids, text))
        named.texts[name] = found
        return found
