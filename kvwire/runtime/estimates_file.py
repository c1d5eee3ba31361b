"""Estimates of links and engines, remembered between processes, so that a first load need not guess.

One small file for all links and engines; on any problem with it, loads go on without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import re
import time
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec

from kvwire._json import strict_json
from kvwire._user_file import FILE_MODE, check_owner, read_at_most, replace_unflushed, user_file, writable_place
from kvwire.controller import CostModel, DecodeCost, Estimates, PrefillCost
from kvwire.errors import ArgumentError, CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvwire.codec import Backend
    from kvwire.engines.base import Engine
    from kvwire.runtime.corpus import Corpus

_log = logging.getLogger(__name__)

VARIABLE = "KVWIRE_ESTIMATES"
"""Environment variable: path of the file, or ``off``."""
_VERSION: Literal[1] = 1
_PARTS = ("link", "engine")
_MOST_ENTRIES = 128  # per part
_MOST_KEY_CHARS = 300
_MOST_BYTES = 1 << 20
_LOCK_PATIENCE_S = 5.0
_LOCK_POLL_S = 0.005
_CPU_LINES, _CPU_CHARS = 64, 70
_END_OF_TIME = 1e11  # seconds since 1970
_PORTS = {"http": 80, "https": 443}
_PLAIN = re.compile(r"[\w.+ -]{1,80}(/[\w.+ -]{1,80})?")  # written as it is; anything else as a digest
_NO_COSTS = CostModel(PrefillCost(0, 0), DecodeCost(0, 0))


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """An estimate's state, and when it was saved."""

    saved: Annotated[float, msgspec.Meta(ge=0, lt=_END_OF_TIME)]
    state: Any


_Entries = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=_MOST_KEY_CHARS)], _Entry], msgspec.Meta(max_length=_MOST_ENTRIES)
]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The file's content."""

    version: Literal[1]
    link: _Entries
    engine: _Entries


@dataclass(frozen=True)
class Remembered:
    """Estimates of a link and an engine.

    Attributes:
        state: A state for ``Estimates.of_state``, without ``link`` or ``engine`` if not known.
        age_s: Age of the link's part, in seconds.
    """

    state: dict[str, object]
    age_s: float

    @property
    def has_engine(self) -> bool:
        """Whether the engine's costs are known, and so not measured before a load."""
        return "engine" in self.state


class EstimatesFile:
    """Estimates by link and by engine. Methods never raise for a bad file or disk."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time, *, is_named: bool = True) -> None:
        """Name the file; it is not read yet."""
        self._path = path
        self._is_named = is_named
        self._clock = clock
        self._warned = False

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> EstimatesFile:
        """The file named by ``KVWIRE_ESTIMATES``, or ``kvwire/estimates.json`` in the user's cache folder."""
        return cls(user_file(environment, VARIABLE, "estimates.json"), is_named=bool(environment.get(VARIABLE)))

    def recall(self, link: str, engine: str) -> Remembered:
        """Read the estimates of a link and an engine from the file."""
        file = self._read()
        state: dict[str, object] = {"version": _VERSION}
        age_s = 0.0
        for part, key in zip(_PARTS, (link, engine), strict=True):
            entry: _Entry | None = getattr(file, part).get(key) if file else None
            if entry is None or not self._is_sound(part, entry.state):
                continue
            state[part] = entry.state
            if part == "link":
                age_s = max(0.0, self._clock() - entry.saved)
        return Remembered(state, age_s)

    def remember(self, link: str, engine: str | None, estimates: Estimates) -> None:
        """Write estimates; entries of other processes stay. Waits for a lock: call it in a thread.

        Only a file of estimates, an empty one or none is written; of a symbolic link, the target.
        """
        state = estimates.to_state()
        new = {"link": (link, state["link"])} if estimates.knows_link else {}
        if engine is not None:
            new["engine"] = engine, state["engine"]
        if self._path is None or not new or self._read() is None:
            return
        try:
            path = writable_place(self._path)
            with _locked(path):
                file, now = self._read(), self._clock()
                if file is None:
                    return
                for part, (key, value) in new.items():
                    entries = {at: each for at, each in getattr(file, part).items() if self._is_sound(part, each.state)}
                    if part == "link" or estimates.knows_engine or key not in entries:
                        entries[key] = _Entry(now, value)
                    setattr(file, part, entries)
                replace_unflushed(path, _encoded(file, now))
        except (OSError, ValueError) as error:
            self._warn(f"cannot write {self._path}: {_words(error)}; estimates are not remembered")

    def _read(self) -> _File | None:
        """Read the file; None if it holds anything else, which must not be overwritten."""
        nothing = _File(_VERSION, {}, {})
        if self._path is None:
            return nothing
        try:
            if not self._is_named:
                check_owner(self._path, VARIABLE)
            content = read_at_most(self._path, _MOST_BYTES)
        except FileNotFoundError:
            return nothing
        except (OSError, ValueError) as error:
            self._warn(f"cannot read {self._path}: {_words(error)}; loads start from priors, and nothing is remembered")
            return None
        if not content:
            return nothing
        try:
            return _decoded(content)
        except (CorruptError, ArgumentError):
            other = _what_else(content)
            self._warn(
                f"{self._path} {other + ', and is left as it is' if other else 'is damaged; it is written again'}"
            )
            return None if other else nothing

    def _is_sound(self, part: str, state: object) -> bool:
        try:
            Estimates.of_state({"version": _VERSION, part: state}, _NO_COSTS, 1.0, 0.0)
        except CorruptError as error:
            self._warn(f"{self._path}: {error}")
            return False
        return True

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s", what)


def link_key(url: str, emulated: str = "") -> str:
    """Name of the link to a store: scheme, host, port and bucket, or a path's digest; without query and user."""
    try:
        place = _place(url)
    except ValueError:
        place = "unknown"
    return f"{place} behind {_digest(emulated)}" if emulated else place


def engine_key(*parts: str) -> str:
    """Name of an engine, from everything that affects its speed; empty parts are left out."""
    return " | ".join(map(_plain, filter(None, parts)))


def processor() -> str:
    """The processor's architecture, with its name if the system tells it."""
    name = platform.processor()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        lines = (line.partition(":") for line in islice(file, _CPU_LINES))
        name = next((value for key, _, value in lines if key.strip() == "model name"), name)
    words = re.sub(r"[^\w.+-]+", " ", f"{name} {platform.machine()}").split()
    return " ".join(dict.fromkeys(words))[:_CPU_CHARS]


def _place(url: str) -> str:
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme in ("", "file"):
        return f"folder {_digest(os.path.realpath(unquote(parts.path)))}"
    if not _PLAIN.fullmatch(scheme):
        return "unknown"
    if scheme == "s3":
        options = parse_qs(parts.query, max_num_fields=9)
        bucket, region = parts.netloc.rpartition("@")[2], options.get("region", [""])[0]
        where = _host(urlsplit(options["endpoint"][0])) if "endpoint" in options else region
        return f"s3://{_plain(bucket)} at {where or 'default'}"[:_MOST_KEY_CHARS]
    if parts.hostname or scheme in _PORTS:
        return f"{scheme}://{_host(parts)}"
    return f"{scheme} {_digest(parts.path)}" if parts.path else scheme


def _host(parts: SplitResult) -> str:
    host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    shown = host if len(host) < _MOST_KEY_CHARS // 2 else _digest(host)
    return f"{shown}:{port}" if port else _plain(shown)


def _plain(text: str) -> str:
    """A name as it is, or the digest of one that is long or unusual."""
    return text if _PLAIN.fullmatch(text) else _digest(text)


def _digest(text: str) -> str:
    return "#" + sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _decoded(content: bytes) -> _File:
    """The file's content; CorruptError or ArgumentError for a file written elsewhere."""
    if len(content) > _MOST_BYTES:
        raise CorruptError("not a file of estimates")
    try:
        return msgspec.convert(strict_json(content), _File)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise CorruptError("not a file of estimates") from error


def _what_else(content: bytes) -> str:
    """Describe a file not written by this version; empty for a damaged one of this version."""
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        whole = None
    version = whole.get("version") if isinstance(whole, dict) and set(whole) == {"version", *_PARTS} else None
    if type(version) is int and version > _VERSION:
        return "was written by a newer version of kvwire"
    is_ours = type(version) is int and version == _VERSION and all(isinstance(whole[part], dict) for part in _PARTS)
    return "" if is_ours else "is no file of estimates"


def _words(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _encoded(file: _File, now: float) -> bytes:
    """The file's content, without the oldest entries beyond the limit."""
    for part in _PARTS:
        entries: dict[str, _Entry] = getattr(file, part)
        for entry in entries.values():
            entry.saved = min(entry.saved, now)  # an entry from a wrong clock must not stay forever
        latest = sorted(entries.items(), key=lambda item: item[1].saved, reverse=True)
        setattr(file, part, dict(latest[:_MOST_ENTRIES]))
    return json.dumps(msgspec.to_builtins(file), allow_nan=False).encode()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock next to a file; raises OSError if others hold it for too long."""
    descriptor = os.open(
        path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
    )
    try:
        patience = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= patience:
                    raise
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def keys_of(engine: Engine, corpus: Corpus, emulated: str, backend: Backend, beside: int) -> tuple[str, str]:
    """Names of the link and the engine in the file. beside: chunks decoded at a time."""
    import torch  # commands without an engine need none

    from kvwire._version import __version__

    device = engine.device_name or f"{processor()} {os.cpu_count()}"
    meta, dtype = engine.meta, str(engine.dtype).removeprefix("torch.")
    parts = (
        meta.model_id, meta.model_revision, device, dtype, str(torch.get_num_threads()),
        "" if backend == "auto" else backend, f"torch {torch.__version__} kvwire {__version__}",
        f"{beside} decoded at a time" if beside > 1 else "",
    )  # fmt: skip
    return link_key(corpus.catalog.store.url, emulated), engine_key(*parts)
