"""The examples of README and of docs/api/kvwire.md run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import kvwire

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "api" / "kvwire.md")


def test_the_examples_run_as_written(monkeypatch, capsys, demo_model, tmp_path):
    """In a folder like the repository, with a model that is fitted in a moment in the place of the demonstration's."""
    (tmp_path / "demo").symlink_to(demo_model.parent)
    monkeypatch.chdir(tmp_path)
    blocks = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    assert len(blocks) == 3
    paths = re.findall(r'"(demo/[^"]+)"', "".join(blocks))
    assert len(paths) == 2
    assert all((ROOT / path).exists() for path in paths)
    names = {}
    for block in blocks:
        exec(block, names)  # noqa: S102 - this project's own README
    assert names["answer"].text in capsys.readouterr().out
    assert names["past"].get_seq_length() == 2 * names["info"].tokens
    ours, theirs = names["pages"].read(), kvwire.decode(names["blob"], 2, names["profile"], dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(ours.keys, theirs.keys, strict=True))


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
