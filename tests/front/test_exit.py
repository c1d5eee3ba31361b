"""Processes that end while something is still being prepared."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time
import torch
from kvwire.runtime.threads import Warming

begun = []

def steps():
    while True:
        begun.append(torch.linalg.qr(torch.randn(700, 700)))
        yield

warming = Warming()
warming.begin(steps())
while not begun:
    time.sleep(0.001)
print("done")
"""


def test_what_is_being_prepared_does_not_break_the_end():
    """As where nobody closes a loader: a thread that is cut off inside torch takes the process down."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
