#!/usr/bin/env bash
# What users meet: requirements that resolve from the package index alone, for each Python that pyproject.toml claims and
# that is here; and the wheel, without extras, in a clean environment, for which pip installs torch as it is configured
# (gigabytes, where no CPU build is offered). Needs .venv (make .venv) and the index.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The path of Python $1: on PATH, or among pyenv's.
find_python() {
    local candidate
    for candidate in "$(command -v "python$1" || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if [ -n "$candidate" ] && "$candidate" -c '' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

# Runs a command whose words are only of interest when it fails.
quietly() {
    if ! "$@" > "$work/log" 2>&1; then
        echo "failed: $*" >&2
        tail -n 40 "$work/log" >&2
        exit 1
    fi
}

# Old pips download whole wheels to learn what they need.
quietly .venv/bin/python -m venv "$work/tools"
quietly "$work/tools/bin/pip" install --upgrade pip build

# No local wheels, no configuration, no further index: what a stranger's pip sees. PIP_INDEX_URL may name a mirror.
resolve() {
    local python=$1
    shift
    quietly env -u PIP_EXTRA_INDEX_URL -u PIP_CONSTRAINT -u PIP_PRE -u PIP_NO_INDEX PIP_FIND_LINKS= PIP_CONFIG_FILE=/dev/null \
        "$work/tools/bin/pip" --python "$python" install --dry-run --ignore-installed --only-binary :all: "$@"
}
quietly "$work/tools/bin/python" -m build --outdir "$work/dist" .  # the wheel from the sdist
wheel=$(echo "$work"/dist/kvwire-*.whl)
newest=
for version in $(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml); do
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "Python $version: not here, not tried"
        continue
    fi
    resolve "$python" -c constraints.txt "$wheel[dev,demo,docs]"
    resolve "$python" -c constraints.txt "$wheel[train]"
    echo "Python $version: the two commands' requirements, and those of the extra train, resolve from the index alone"
    newest=$python
done
if [ -z "$newest" ]; then
    echo "none of the Pythons that pyproject.toml claims is on PATH or among pyenv's; install one" >&2
    exit 1
fi
resolve "$newest" "$wheel[dev,demo,docs,gpu,train]"
echo "$("$newest" --version): the newest versions that are allowed resolve too"

quietly .venv/bin/python -m venv "$work/clean"
quietly "$work/clean/bin/pip" install -c constraints.txt "$wheel"
cd "$work"
quietly clean/bin/kvwire --help
clean/bin/python - <<'PYTHON'
import importlib.metadata
import importlib.util

import kvwire
import torch

extras = [name for name in ("matplotlib", "pytest") if importlib.util.find_spec(name)]
assert not extras, f"the clean environment has {extras}"
draw = torch.Generator().manual_seed(0)
keys, values = ([torch.randn(2, 300, 64, generator=draw) for _ in range(3)] for _ in range(2))
cache = kvwire.KVCache.from_tensors(keys, values)
blob = kvwire.encode(cache)
info = kvwire.inspect(blob)
finest = kvwire.decode(blob, level=len(info.levels) - 1)
apart = max(float((a - b).norm() / b.norm()) for a, b in zip(finest.keys + finest.values, keys + values, strict=True))
assert apart < 0.05, f"a round trip that is {apart:.3f} off"
print(f"kvwire {importlib.metadata.version('kvwire')}, torch {torch.__version__}: a round trip of {len(blob)} bytes")
PYTHON
