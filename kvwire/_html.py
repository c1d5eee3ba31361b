"""Static HTML pages in one style, light and dark, from 400 pixels on; without network access or scripts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #55555e; --line: #c9c9d1; --paper: #ffffff; --card: #f5f5f8;
  --bad: #a40000; --link: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf1; --soft: #b4b4be; --line: #4a4a54; --paper: #141417;
  --card: #1f1f24; --bad: #ff9c8f; --link: #9cc2ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main, header, footer { max-width: 68rem; margin: 0 auto; padding: 0 1rem; }
a { color: var(--link); }
a:focus-visible, [tabindex]:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -999rem; } .skip:focus { left: 1rem; top: 1rem; background: var(--paper); }
h1 { font-size: 1.6rem; margin: 1.2rem 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.25rem; margin-top: 2.2rem;
  border-top: 1px solid var(--line); padding-top: 1rem; overflow-wrap: anywhere; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
.soft { color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; padding: 0; }
.facts div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.facts dt { color: var(--soft); font-size: .85rem; } .facts dd { margin: 0; font-size: 1.25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding: .3rem 0; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; white-space: normal; min-width: 7rem; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { width: 100%; min-width: 30rem; height: auto; max-width: 46rem; display: block; }
li, p { overflow-wrap: anywhere; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_THOUSAND = 1000


def whole_page(title: str, header: str, main: str, footer: str, *, refresh_s: int = 0) -> str:
    """Write a page."""
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">\n' if refresh_s else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n{refresh}'
        f'<link rel="icon" href="data:,">\n<title>{as_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        '<a class="skip" href="#main">To the content</a>\n'
        f'<header>{header}</header>\n<main id="main">\n{main}\n</main>\n'
        f'<footer><p class="soft">{as_text(footer)}</p></footer>\n</body>\n</html>\n'
    )


def as_text(text: str) -> str:
    """Escape text for HTML; unprintable characters are replaced."""
    return escape("".join(char if char.isprintable() else "\ufffd" for char in text), quote=True)


def in_bytes(size: float) -> str:
    """A size with a unit."""
    unit = 0
    while abs(size) >= _THOUSAND and unit < len(_UNITS) - 1:
        size, unit = size / _THOUSAND, unit + 1
    return f"{size:,.3g} {_UNITS[unit]}" if unit else f"{size:,.0f} B"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A definition list."""
    cells = "".join(f"<div><dt>{as_text(name)}</dt><dd>{as_text(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{cells}</dl>\n'


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls if it is too wide."""
    heads = "".join(f'<th scope="col">{as_text(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{as_text(first)}</th>{"".join(f"<td>{as_text(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{as_text(caption)}"><table><caption>'
        f"{as_text(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )
