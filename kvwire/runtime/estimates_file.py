"""Where estimates live between processes, so that a first load is not blind.

One small file for all links and engines. It is a convenience: whatever is wrong with it, loads go on without it.
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
from typing import TYPE_CHECKING, NoReturn, cast
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from kvwire._json import strict_json
from kvwire._user_file import FILE_MODE, check_owner, read_at_most, replace_unflushed, user_file, writable_place
from kvwire.controller import CostModel, DecodeCost, Estimates, PrefillCost
from kvwire.errors import ArgumentError, CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvwire.codec import Backend
    from kvwire.engines.base import Engine
    from kvwire.runtime.corpus import Corpus

    Entries = dict[str, dict[str, object]]

_log = logging.getLogger(__name__)

VARIABLE = "KVWIRE_ESTIMATES"
"""Environment variable: path of the file, or ``off``."""
_VERSION = 1
_PARTS = ("link", "engine")
_MOST_ENTRIES = 128  # of each part
_MOST_KEY_CHARS = 300
_MOST_BYTES = 1 << 20
_LOCK_PATIENCE_S = 5.0
_LOCK_POLL_S = 0.005
_CPU_LINES, _CPU_CHARS = 64, 70
_END_OF_TIME = 1e11  # seconds since 1970
_PORTS = {"http": 80, "https": 443}
_PLAIN = re.compile(r"[\w.+ -]{1,80}(/[\w.+ -]{1,80})?")  # what may be written as it is; anything else as its digest
_NO_COSTS = CostModel(PrefillCost(0, 0), DecodeCost(0, 0))


@dataclass(frozen=True)
class Remembered:
    """What is known of a link and an engine.

    Attributes:
        state: A state for ``Estimates.of_state``; it lacks ``link`` or ``engine`` where nothing is known of it.
        age_s: Age of the link's part, in seconds.
    """

    state: dict[str, object]
    age_s: float

    @property
    def has_engine(self) -> bool:
        """Whether the engine's costs are known, so that they need not be measured before a load."""
        return "engine" in self.state


class EstimatesFile:
    """Estimates by link and by engine. No method raises for what is wrong with the file or its disk."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time, *, is_named: bool = True) -> None:
        """Name the file; nothing is read yet."""
        self._path = path
        self._is_named = is_named
        self._clock = clock
        self._warned = False

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> EstimatesFile:
        """The file that ``KVWIRE_ESTIMATES`` names, or ``kvwire/estimates.json`` among the user's caches."""
        return cls(user_file(environment, VARIABLE, "estimates.json"), is_named=bool(environment.get(VARIABLE)))

    def recall(self, link: str, engine: str) -> Remembered:
        """What is known of a link and an engine; reads a small file."""
        entries = self._read()
        state: dict[str, object] = {"version": _VERSION}
        age_s = 0.0
        for part, key in zip(_PARTS, (link, engine), strict=True):
            entry = entries[part].get(key) if entries else None
            if entry is None or not self._is_sound(part, entry["state"]):
                continue
            state[part] = entry["state"]
            if part == "link":
                age_s = max(0.0, self._clock() - _saved(entry))
        return Remembered(state, age_s)

    def remember(self, link: str, engine: str | None, estimates: Estimates) -> None:
        """Write down what was measured; what other processes wrote of others stays. Waits for a lock: use a thread.

        Only a regular file of estimates, an empty one or none is written; a symbolic link stays, its target is written.
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
                read = self._read()
                if read is None:
                    return
                entries, now = self._sound(read), self._clock()
                for part, (key, value) in new.items():
                    if part == "link" or estimates.knows_engine or key not in entries[part]:
                        entries[part][key] = {"saved": now, "state": value}
                replace_unflushed(path, _encoded(entries, now))
        except (OSError, ValueError) as error:
            self._warn(f"cannot write {self._path}: {_words(error)}; estimates are not remembered")

    def _read(self) -> dict[str, Entries] | None:
        """What the file holds; None where something else is there, which must not be written over."""
        nothing: dict[str, Entries] = {part: {} for part in _PARTS}
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
                f"{self._path} {other + ', and is left as it is' if other else 'is damaged; it is written anew'}"
            )
            return None if other else nothing

    def _sound(self, entries: dict[str, Entries]) -> dict[str, Entries]:
        return {
            part: {key: entry for key, entry in entries[part].items() if self._is_sound(part, entry["state"])}
            for part in _PARTS
        }

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
    """Name of the link to a store: scheme, host, port and bucket, or the digest of a path; no query, no user."""
    try:
        place = _place(url)
    except ValueError:
        place = "unknown"
    return f"{place} behind {_digest(emulated)}" if emulated else place


def engine_key(
    model: str, revision: str, device: str, dtype: str, threads: int, backend: str = "", versions: str = "",
    decode_threads: int = 1,
) -> str:  # fmt: skip
    """Name of an engine: what its speed depends on."""
    beside = f"{decode_threads} decoded at a time" if decode_threads > 1 else ""
    parts = (model, revision, device, dtype, str(threads), backend, versions, beside)
    return " | ".join(part if _PLAIN.fullmatch(part) else _digest(part) for part in parts if part)


def processor() -> str:
    """The processor's name where the system tells it, and its kind in any case."""
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
    if scheme in _PORTS:
        return f"{scheme}://{_host(url)}"
    if scheme != "s3":
        return _other_place(parts) if _PLAIN.fullmatch(scheme) else "unknown"
    options = parse_qs(parts.query, max_num_fields=9)
    bucket, region = parts.netloc.rpartition("@")[2], options.get("region", [""])[0]
    where = _host(options["endpoint"][0]) if "endpoint" in options else region
    return f"s3://{bucket if _PLAIN.fullmatch(bucket) else _digest(bucket)} at {where or 'default'}"[:_MOST_KEY_CHARS]


def _other_place(parts: SplitResult) -> str:
    """Of a scheme that only its store knows: the host where there is one, else which path it is."""
    if parts.hostname:
        host = parts.hostname if _PLAIN.fullmatch(parts.hostname) else _digest(parts.hostname)
        return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")
    return f"{parts.scheme} {_digest(parts.path)}" if parts.path else parts.scheme


def _host(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{host if len(host) < _MOST_KEY_CHARS // 2 else _digest(host)}:{parts.port or _PORTS.get(parts.scheme, 0)}"


def _digest(text: str) -> str:
    return "#" + sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _decoded(content: bytes) -> dict[str, Entries]:
    """Entries by part and key; CorruptError or ArgumentError for anything that was not written here."""
    if len(content) > _MOST_BYTES:
        _refuse()
    whole = strict_json(content)
    if not isinstance(whole, dict) or set(whole) != {"version", *_PARTS} or whole["version"] != _VERSION:
        _refuse()
    for part in _PARTS:
        entries = whole[part]
        if not isinstance(entries, dict) or len(entries) > _MOST_ENTRIES:
            _refuse()
        for key, entry in entries.items():
            if len(key) > _MOST_KEY_CHARS or not isinstance(entry, dict) or set(entry) != {"saved", "state"}:
                _refuse()
            saved = entry["saved"]
            if isinstance(saved, bool) or not isinstance(saved, (int, float)) or not 0 <= saved < _END_OF_TIME:
                _refuse()
    return {part: whole[part] for part in _PARTS}


def _what_else(content: bytes) -> str:
    """What a file is, in words, that was not written here by this version; empty for one that only is damaged."""
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        return "is no file of estimates"
    if not isinstance(whole, dict) or set(whole) != {"version", *_PARTS}:
        return "is no file of estimates"
    version = whole["version"]
    if isinstance(version, bool) or not isinstance(version, int) or version < _VERSION:
        return "is no file of estimates"
    if version > _VERSION:
        return "was written by a newer version of kvwire"
    return "" if all(isinstance(whole[part], dict) for part in _PARTS) else "is no file of estimates"


def _words(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _refuse() -> NoReturn:
    msg = "not a file of estimates"
    raise CorruptError(msg)


def _saved(entry: dict[str, object]) -> float:
    return cast("float", entry["saved"])


def _saved_item(item: tuple[str, dict[str, object]]) -> float:
    return _saved(item[1])


def _encoded(entries: dict[str, Entries], now: float) -> bytes:
    """The file's content, without the oldest entries where there are too many."""
    whole: dict[str, object] = {"version": _VERSION}
    for part in _PARTS:
        for entry in entries[part].values():
            entry["saved"] = min(_saved(entry), now)  # a clock that was wrong once must not keep it forever
        latest = sorted(entries[part].items(), key=_saved_item, reverse=True)
        whole[part] = dict(latest[:_MOST_ENTRIES])
    return json.dumps(whole, allow_nan=False).encode()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside a file; raises OSError where others hold it for too long."""
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
    """Names of the link and the engine in the file of estimates. beside: chunks that are decoded at a time."""
    import torch  # commands that ask no engine need none

    from kvwire._version import __version__

    device = engine.device_name or f"{processor()} {os.cpu_count()}"
    meta, dtype = engine.meta, str(engine.dtype).removeprefix("torch.")
    kernels = "" if backend == "auto" else backend
    versions = f"torch {torch.__version__} kvwire {__version__}"
    named = engine_key(
        meta.model_id, meta.model_revision, device, dtype, torch.get_num_threads(), kernels, versions, beside
    )
    return link_key(corpus.catalog.store.url, emulated), named
