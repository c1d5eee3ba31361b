"""Run many mutants: ``python -m tests.codec.fuzz --mutants 100000 --seed 7 --jobs 2``, or ``make fuzz N=100000``.

Ends with 1 where there are findings; each is kept with its bytes and its words. With ``NUMBA_BOUNDSCHECK=1`` every
index of the compiled kernels is checked, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

BOUNDSCHECK = "NUMBA_BOUNDSCHECK"


def keeper(folder: Path, seed: int):
    """What keeps the files of findings."""

    def keep(mutant) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for ending, data in mutant.files.items():
            (folder / f"{seed}-{mutant.number}.{ending}").write_bytes(data)
        words = f"{mutant.what}\n{mutant.outcome.finding}\n"
        (folder / f"{seed}-{mutant.number}.txt").write_text(words, encoding="utf-8")

    return keep


def summary(tally, seed: int, seconds: float) -> str:
    """One line."""
    equal = sum(count for name, count in tally.kinds.items() if name.endswith("equal"))
    return (
        f"{tally.mutants} mutants of seed {seed}: {equal} accepted and decoded alike, "
        f"{tally.mutants - equal} refused or undefined, {len(tally.findings)} findings; at most {tally.seconds:.2f} s "
        f"and {tally.bytes >> 10} KiB each, {tally.resident >> 20} MiB resident; {tally.mutants / seconds:.1f} a second"
    )


def main() -> int:
    """Read the command line, run, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one; a finding names its number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder for findings")
    parser.add_argument("--kinds", action="store_true", help="tell how often each outcome was met")
    options = parser.parse_args()
    if os.environ.get(BOUNDSCHECK):  # numba's cache does not tell kernels with checks from those without
        os.environ.setdefault("NUMBA_CACHE_DIR", str(Path("build/numba-boundscheck").absolute()))
    from .workers import run_all

    started = time.monotonic()
    numbers = range(options.first, options.first + options.mutants)
    tally = run_all(options.seed, numbers, options.jobs, keeper(options.out, options.seed))
    lines = [f"{count:8} {name}" for name, count in sorted(tally.kinds.items())] if options.kinds else []
    lines += [f"finding {finding}" for finding in tally.findings]
    sys.stdout.write("\n".join([*lines, summary(tally, options.seed, time.monotonic() - started), ""]))
    return int(bool(tally.findings))


if __name__ == "__main__":
    sys.exit(main())
