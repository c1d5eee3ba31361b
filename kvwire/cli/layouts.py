"""What ``--links`` and ``--soft-tokens`` name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, NotFoundError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkLayout, SoftTokens


def read_soft_tokens(path: Path) -> SoftTokens:
    """Read a file of soft tokens."""
    from kvwire._user_file import read_at_most
    from kvwire.reuse import SoftTokens
    from kvwire.reuse.soft_tokens import MAX_FILE_BYTES

    try:
        data = read_at_most(path, MAX_FILE_BYTES)
    except FileNotFoundError as error:
        msg = f"{path} is not there; --soft-tokens names a file that kvwire train-links wrote"
        raise NotFoundError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); --soft-tokens names a file that kvwire train-links wrote"
        raise StorageError(msg) from error
    if len(data) > MAX_FILE_BYTES:
        msg = f"{path} is longer than any file of soft tokens; name the one that kvwire train-links wrote"
        raise CorruptError(msg)
    return SoftTokens.from_bytes(data)


def use_layout(engine: Engine, links: str | None, soft_tokens: Path | None) -> LinkLayout:
    """The layout that options name; soft tokens are put into the engine."""
    from kvwire.reuse import PLAIN, read_layout

    layout = read_layout(links) if links else PLAIN
    if soft_tokens is None:
        return layout
    soft = read_soft_tokens(soft_tokens)
    layout = layout if links else soft.link_layout
    soft.check_layout(layout)
    engine.use_soft_tokens(soft)
    return layout
