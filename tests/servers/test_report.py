"""Reports and status pages in Chromium: silent consoles, nothing over the edge, light and dark."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from kvwire.report import survey, write_page
from kvwire.store import MemoryStore, open_tiers
from kvwire.transport.server.metrics import ServerMetrics, StatusPage

from ..front.conftest import *  # noqa: F403 - its corpus
from ..front.test_report import store  # noqa: F401 - a fixture

pytestmark = pytest.mark.servers
CHROMIUM = Path(__file__).parent / "chromium.sh"
PROBE = """<script>
const wide = [...document.querySelectorAll("body *")].filter((each) => {
  for (let up = each; up; up = up.parentElement) if (getComputedStyle(up).overflowX === "auto") return false;
  return each.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && each.tagName !== "A";
});
document.title = JSON.stringify({
  wide: wide.map((each) => each.tagName), ink: getComputedStyle(document.body).color,
  unnamed: [...document.querySelectorAll("svg, [role=region]")].filter((each) => !each.ariaLabel).length,
});
</script>"""


def browse(page: Path, width: int, *, dark: bool) -> tuple[str, str]:
    """The page as it is after loading, and what was written to the console."""
    words = [CHROMIUM, f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},900"]
    done = subprocess.run(
        [*words, "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def check(html: str, page: Path, width: int, *, dark: bool) -> None:
    """The page is silent, no wider than the window, named for screen readers, and in the colours asked for."""
    page.write_text(html, encoding="utf-8")
    assert browse(page, width, dark=dark)[1] == ""
    allowed = html.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    page.write_text(allowed.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    shown, console = browse(page, width, dark=dark)
    assert console == ""
    title = shown[shown.index("<title>") : shown.index("</title>")]
    assert '"wide":[]' in title, title
    assert '"unnamed":0' in title, title
    assert ("236, 236, 241" if dark else "27, 27, 31") in title


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 800, 1600])
@pytest.mark.parametrize("full", [False, True])
def test_a_page_fits_and_says_nothing_to_the_console(store, tmp_path, width, dark, full):  # noqa: F811
    check(write_page(survey(store if full else MemoryStore())), tmp_path / "page.html", width, dark=dark)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 800, 1600])
def test_a_servers_status_fits_and_says_nothing_to_the_console(tmp_path, width, dark):
    metrics, now = ServerMetrics(), [0.0]
    with closing(open_tiers(MemoryStore(), memory_bytes=1 << 20)) as tiers:
        page = StatusPage(tiers, metrics, lambda: now[0])
        for second in range(100):
            now[0] += 1.0
            for _ in range(second % 7):
                metrics.begin()
                metrics.end("GET", 503 if second == 95 else 200, 0.01, 0.002)
                metrics.sent_bytes.inc(123_456_789)
            page.look()
        check(page.render(), tmp_path / "status.html", width, dark=dark)
