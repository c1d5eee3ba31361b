"""Hooks of ``mkdocs.yml``: pages that lie outside ``docs/``, and generated lists of pages.

README.md becomes the start page; CHANGELOG.md, the pages of the benchmarks and the README of the demonstration become
pages of their own. Links between files of the repository work on the site too: to a page where there is one, else the
file's path is shown as text. A link to a file that is missing stays a link, which fails the strict build.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

import griffe
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/ablation.md": "ablation.md",
    "benchmarks/scale.md": "scale.md",
    "demo/README.md": "demo.md",
}
"""Pages outside ``docs/`` with their places on the site."""
SECTIONS = {"How to": "how-to", "Decisions": "adr"}
"""Sections of the navigation that list a folder of ``docs/``."""
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_OUTSIDE = re.compile(r"[a-z]+:")
_SHAPE = re.compile(r"(?<![`\w])\w*\[\w+\]\[\w+\](?!`)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections that list a folder."""
    for section in config.nav or []:
        for name, folder in SECTIONS.items():
            if name in section:
                pages = sorted((ROOT / "docs" / folder).glob("*.md"))
                section[name] = [page.relative_to(ROOT / "docs").as_posix() for page in pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs/`` and the pictures that they show."""
    for source, place in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=_linked(text, source)))
        for found in _LINK.finditer(text):
            picture = _target(source, found["target"])
            inside = picture.startswith("docs/") or files.get_file_from_path(picture)
            if found["image"] and not inside and (ROOT / picture).is_file():
                files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - the interface
    """Links of a page in ``docs/``, as they work on the site."""
    source = page.file.src_uri
    return markdown if source in PAGES.values() else _linked(markdown, f"docs/{source}")


def _target(source: str, target: str) -> str:
    """Path from the root of what a file links to."""
    return normpath((PurePosixPath(source).parent / target).as_posix())


def _place(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return PAGES.get(path) or path.removeprefix("docs/")


def _linked(text: str, source: str) -> str:
    """A page's text with links that work on the site."""

    def turned(link: re.Match[str]) -> str:
        path = _target(source, link["target"])
        if _OUTSIDE.match(link["target"]) or not (ROOT / path).exists():
            return link[0]
        if path in PAGES or path.startswith("docs/") or link["image"]:
            target = relpath(_place(path), PurePosixPath(_place(source)).parent.as_posix())
            return f"{link['image']}[{link['text']}]({target}{link['anchor'] or ''})"
        return link["text"] if "`" in link["text"] or link["text"] == path else f"{link['text']} (`{path}`)"

    return _LINK.sub(turned, text)


class Shapes(griffe.Extension):
    """``[chunk][level]`` in a docstring is a shape, where Markdown sees a link."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Write such shapes as code."""
        if obj.docstring:
            obj.docstring.value = _SHAPE.sub(r"`\g<0>`", obj.docstring.value)
