"""Models by their id on the Hugging Face Hub, as far as they are in this machine's cache: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from kvwire.errors import ArgumentError, NotFoundError


def find_folder(path: str | Path, revision: str | None = None) -> tuple[Path, str]:
    """Find the folder of a model.

    Args:
        path: A folder, or an id on the Hub such as ``organisation/model``.
        revision: Of an id: branch, tag or commit; None: the main branch as it was when it was downloaded.

    Returns:
        The folder, and the model's name.

    Raises:
        NotFoundError: There is no such folder, and the cache has no such snapshot.
        ArgumentError: A folder was given a revision.
    """
    folder = Path(path).expanduser()
    if folder.exists() or isinstance(path, Path):
        if revision is not None:
            msg = f"{folder} is a folder, which has no revisions; leave revision out, or name an id on the Hub"
            raise ArgumentError(msg)
        return folder, folder.resolve().name
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True)), path
    except (HFValidationError, LocalEntryNotFoundError) as error:
        wanted = f"{path} --revision {revision}" if revision else path
        msg = (
            f"{path} is no folder with a model (config.json is missing), and {constants.HF_HUB_CACHE} holds no "
            f"snapshot of it; name a folder saved by save_pretrained, or fetch it first: hf download {wanted}"
        )
        raise NotFoundError(msg) from error
