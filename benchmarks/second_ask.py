"""Time to the first token of later questions over a link with a round trip, beside another checkout of this project.

    python benchmarks/second_ask.py --other path/to/other/checkout

The server stands behind a shaped link (``shaped_parts``). Each side is a process that opens a loader and asks the same
question six times; sides take turns, and the first question is left out, since it connects and reads the profile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from measure import summary, write_json
from shaped_parts.shaped_link import shaped_link

ROOT = Path(__file__).resolve().parents[1]
ASK = """
import json, sys
import torch, kvwire
from kvwire.controller import CostModel, DecodeCost, PrefillCost
url, token, folder, names, asks = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4].split(), int(sys.argv[5])
engine = kvwire.open_engine(folder, dtype=torch.float32)
costs = CostModel(PrefillCost(10.0, 1.0), DecodeCost(0.005, 1e-9))
loader = kvwire.Loader(engine, kvwire.Corpus(engine, kvwire.open_store(url, token=token)), costs=costs)
question = engine.tokenize("It was plain to everybody that")
print(json.dumps([loader.ask(names, question).timing.ttft_s for _ in range(asks)]))
"""


def main() -> None:
    """Measure both sides in turns, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="another checkout of kvwire")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--mbit", type=float, default=500.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "second_ask.json")
    args = parser.parse_args()
    names, model = ["01-the-lighthouse-keeper", "02-the-bell-of-ashcombe"], ROOT / "demo" / "model"
    sides: dict[str, list[float]] = {"this": [], "other": []}
    with TemporaryDirectory() as folder:
        texts = [str(ROOT / "demo" / "documents" / f"{name}.txt") for name in names]
        words = ["encode", *texts, "--model", str(model), "--store", folder]
        subprocess.run([sys.executable, "-m", "kvwire", *words], check=True, capture_output=True)
        with shaped_link(Path(folder), args.mbit * 125e3, rtt_s=args.rtt_ms / 1000) as link:
            for _ in range(args.rounds):
                for side, root in (("this", ROOT), ("other", args.other)):
                    at = {**os.environ, "PYTHONPATH": str(root), "KVWIRE_ESTIMATES": "off"}
                    command = [sys.executable, "-c", ASK, link.url, link.token, str(model), " ".join(names), "6"]
                    done = subprocess.run(command, check=True, capture_output=True, text=True, env=at, cwd=folder)
                    sides[side] += json.loads(done.stdout)[1:]
    shorter_s = statistics.median(sides["other"]) - statistics.median(sides["this"])
    settings = {
        "model": "demo/model, float32, CPU", "text": ", ".join(names), "rtt_ms": args.rtt_ms, "mbit": args.mbit,
        "rounds": args.rounds,
    }  # fmt: skip
    results = {
        "ttft_s": {side: summary(times) for side, times in sides.items()},
        "shorter_by_round_trips": shorter_s / (args.rtt_ms / 1000),
    }
    write_json(args.out, "second_ask", settings, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
