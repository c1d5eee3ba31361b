"""The documentation names files that are there; ``make docs`` checks the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
ROOMS = "benchmarks|codec|controller|demo|engines|kvwire|reuse|scripts|store|tests|transport"


def outside_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)", outside_code(page))
    missing = [link for link in links if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists()]
    paths = re.findall(rf"`((?:{ROOMS})/[\w./-]*)", outside_code(page))
    assert not missing + [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_modules_named_by_the_end_of_their_path_are_there(page):
    """Such as ``policies/simple.py`` on a page about policies."""
    modules = {
        f"/{path.relative_to(ROOT).as_posix()}" for room in ROOMS.split("|") for path in (ROOT / room).rglob("*.py")
    }
    named = re.findall(r"`([\w./-]*\w\.py)\b", outside_code(page))
    assert not [name for name in named if not any(module.endswith(f"/{name}") for module in modules)]


def test_how_to_pages_are_short():
    assert not [page.name for page in PAGES if page.parent.name == "how-to" and len(page.read_text().splitlines()) > 40]
