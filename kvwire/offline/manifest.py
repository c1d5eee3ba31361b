"""The manifest of a run: one row per document, as Parquet or JSON lines."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from kvwire._json import record
from kvwire._lazy import require
from kvwire._user_file import file_errors
from kvwire.errors import ArgumentError, CorruptError, NotFoundError
from kvwire.store.files.files import put_in_place

if TYPE_CHECKING:
    from collections.abc import Iterator

Status: TypeAlias = Literal["encoded", "there already", "kept as text", "failed"]
_GROUP_ROWS = 10_000
_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class LevelRow:
    """One level of a document's blob.

    Attributes:
        name: Name of the level.
        bytes: Bytes that a reader of it fetches, header and index included.
        bits_per_element: These bytes, per number of the cache.
        error: Measured and relative; ``kvwire.codec.error_of_method`` names the quantity.
        kl: Expected divergence of the next token's distribution, in nats; None if the model was not measured.
    """

    name: str
    bytes: int
    bits_per_element: float
    error: float
    kl: float | None = None


@dataclass(frozen=True)
class Row:
    """The result for one document.

    Attributes:
        id: Its name in the catalog.
        source: Location of its text.
        status: The outcome.
        tokens: Length; 0 if not counted.
        bytes: Size of the blob; 0 without one.
        blob: SHA-256 of the stored blob; empty without one.
        profile: SHA-256 of the blob's profile.
        levels: Coarsest first.
        read_s: Seconds of reading the text.
        tokenize_s: Seconds of tokenising it.
        look_up_s: Seconds of the catalog's look-up.
        prefill_s: Seconds in the model.
        encode_s: Seconds in the codec.
        upload_s: Seconds of writing text, blob and entries.
        reason: What went wrong.
        advice: What to do about it.
    """

    id: str
    source: str
    status: Status = "failed"
    tokens: int = 0
    bytes: int = 0
    blob: str = ""
    profile: str = ""
    levels: tuple[LevelRow, ...] = ()
    read_s: float = 0.0
    tokenize_s: float = 0.0
    look_up_s: float = 0.0
    prefill_s: float = 0.0
    encode_s: float = 0.0
    upload_s: float = 0.0
    reason: str = ""
    advice: str = ""

    @property
    def problem(self) -> str:
        """Reason and advice in one line."""
        return "; ".join(filter(None, (self.reason, self.advice)))

    def to_json(self) -> str:
        """One line of ASCII; other characters are escaped."""
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Row:
        """Validate a row.

        Args:
            found: Fields from ``to_json`` or Parquet.

        Returns:
            The row.

        Raises:
            CorruptError: It is invalid.
        """
        return record(found, cls, "a row of the manifest", "write it again with kvwire encode --manifest")


class ManifestWriter(Protocol):
    """Writes rows in order."""

    def add(self, row: Row) -> None:
        """Add one row."""

    def close(self) -> None:
        """Write the remaining rows."""


class _LinesWriter:
    def __init__(self, path: Path) -> None:
        with _storage_errors(path):
            self._path, self._file = path, path.open("w", encoding="ascii")

    def add(self, row: Row) -> None:
        with _storage_errors(self._path):
            self._file.write(row.to_json() + "\n")

    def close(self) -> None:
        with _storage_errors(self._path):
            self._file.close()


class _ParquetWriter:
    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        numbers = [(each, pa.float64()) for each in ("bits_per_element", "error", "kl")]
        level = pa.struct([("name", pa.string()), ("bytes", pa.int64()), *numbers])
        types = {"int": pa.int64(), "float": pa.float64(), "tuple[LevelRow, ...]": pa.list_(level)}
        fields = [(name, types.get(str(kind), pa.string())) for name, kind in Row.__annotations__.items()]
        self._schema, self._path = pa.schema(fields, metadata={"kvwire.manifest": "1"}), path
        self._rows: list[dict[str, Any]] = []
        with _storage_errors(path):
            self._writer = pq.ParquetWriter(path, self._schema)

    def add(self, row: Row) -> None:
        names = {name: _encodable(getattr(row, name)) for name in ("id", "source", "reason", "advice")}
        self._rows.append(asdict(row) | names)
        if len(self._rows) == _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        with _storage_errors(self._path):
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows.clear()

    def close(self) -> None:
        self._flush()
        with _storage_errors(self._path):
            self._writer.close()


def _storage_errors(path: Path) -> AbstractContextManager[None]:
    return file_errors(f"{path} cannot be written", "check the folder and the space that is left")


def _encodable(name: str) -> str:
    """A name as valid UTF-8: other bytes of file names are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def check_manifest_name(path: str) -> Path:
    """Refuse an unusable manifest name before encoding starts."""
    target = Path(path).expanduser()
    if target.suffix not in (".parquet", *_LINES):
        raise ArgumentError(f"a manifest is a .parquet or .jsonl file, {target.name[-40:]!r} is neither; rename it")
    if target.suffix == ".parquet":
        require("pyarrow", "parquet", "a manifest as Parquet")
    return target


@contextmanager
def writing(path: str) -> Iterator[ManifestWriter]:
    """Write a manifest; the file appears once it is complete.

    Args:
        path: Path of the file: .parquet, or .jsonl for JSON lines, which need no extra.

    Yields:
        The writer.

    Raises:
        ArgumentError: The name has another ending, or pyarrow is not installed.
        StorageError: The file cannot be written.
    """
    target = check_manifest_name(path)
    part = target.with_name(target.name + ".part")
    writer: ManifestWriter = _LinesWriter(part) if target.suffix in _LINES else _ParquetWriter(part)
    try:
        yield writer
        writer.close()
        with _storage_errors(target):
            put_in_place(part, target)
    except BaseException:
        with suppress(OSError):
            writer.close()
            part.unlink(missing_ok=True)
        raise


def read_manifest(path: str) -> list[Row]:
    """Read a manifest.

    Args:
        path: Path of the file.

    Returns:
        Its rows.

    Raises:
        NotFoundError: There is no such file.
        CorruptError: It is no manifest.
        ArgumentError: It is Parquet, and pyarrow is not installed.
    """
    target = Path(path).expanduser()
    if not target.is_file():
        raise NotFoundError(f"{target} is not a file; write one with kvwire encode --manifest FILE")
    if target.suffix not in _LINES:
        require("pyarrow", "parquet", "reading Parquet")
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return [Row.from_dict(fields) for fields in pq.read_table(target).to_pylist()]
        except (OSError, pa.ArrowException) as error:
            msg = f"{target} cannot be read as Parquet; write it again with kvwire encode --manifest"
            raise CorruptError(msg) from error
    try:
        return [Row.from_dict(json.loads(line)) for line in target.read_text(encoding="ascii").splitlines()]
    except (ValueError, OSError) as error:
        raise CorruptError(f"{target} is no manifest; write it again with kvwire encode --manifest") from error
