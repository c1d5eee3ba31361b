"""The status page: who sees it, and that it says what happened."""

import asyncio
import base64
import hashlib
import re
from contextlib import closing
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from kvwire.store import MemoryStore, open_tiers
from kvwire.transport import AccessSettings, ServerSettings, serve
from kvwire.transport.server import application
from kvwire.transport.server.access import Access
from kvwire.transport.server.metrics import ServerMetrics, StatusPage, _duration

from .conftest import answered

METRICS, FULL = "metrics-token-of-tests", "token-with-full-rights"
SHOWN = ServerSettings(status=True)


class Texts(HTMLParser):
    """Texts of a page, and its elements' attributes."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data.strip())

    def behind(self, name):
        """What is told by a name."""
        return self.texts[self.texts.index(name) + 1]


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def page(clock):
    return StatusPage(MemoryStore(), ServerMetrics(), lambda: clock.now)


def passed(name, password):
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


async def test_it_is_shown_where_that_is_asked_for_alone(session, store):
    async with serve(store) as url, session.get(f"{url}/status") as response:
        assert response.status == 404
    async with serve(store, settings=SHOWN) as url:
        async with session.get(f"{url}/status") as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            assert response.headers["Cache-Control"] == "no-store"
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert "kvwire serve" in await response.text()
        for method in ("PUT", "DELETE", "POST"):
            assert await answered(session.request(method, f"{url}/status", data=b"x")) == 405
        assert await answered(session.get(f"{url}/status", headers={"Host": "evil.example"})) == 403


async def test_whoever_may_see_metrics_sees_it_and_a_browser_may_ask_for_the_token(session, store):
    access = AccessSettings(token=FULL, metrics_token=METRICS)
    async with serve(store, access=access, settings=SHOWN) as url:
        asked = [({"Authorization": f"Bearer {token}"}, status) for token, status in ((METRICS, 200), (FULL, 200))]
        asked += [(passed("anyone", METRICS), 200), (passed("", FULL), 200), (passed("a", METRICS + "x"), 401)]
        asked += [({}, 401), ({"Authorization": "Basic \xff!"}, 401), ({"Authorization": "Basic Og=="}, 401)]
        for headers, status in asked:
            async with session.get(f"{url}/status", headers=headers) as response:
                assert response.status == status, headers
                if status == 401:
                    assert response.headers["WWW-Authenticate"].startswith("Basic ")
        for path in ("", "?list", "v1/blob.kvw"):  # a password opens no objects
            async with session.get(f"{url}/{path}", headers=passed("", FULL)) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_a_page_that_fails_ends_no_housekeeping(store, monkeypatch, caplog):
    looked, again = [], asyncio.Event()

    def refresh(*_args, **_options):
        looked.append(1)
        if len(looked) > 1:
            loop.call_soon_threadsafe(again.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(application, "_REFRESH_S", 0.01)
    monkeypatch.setattr(StatusPage, "look", lambda _: 1 / 0)
    monkeypatch.setattr(Access, "refresh", refresh)
    async with serve(store, access=AccessSettings(token=FULL), settings=SHOWN), asyncio.timeout(20):
        await again.wait()
    assert "the status page could not be kept up" in caplog.text


async def test_it_counts_what_was_asked(session, store, blob):
    async with serve(store, settings=SHOWN) as url:
        for path in ("v1/blob.kvw", "v1/blob.kvw", "absent"):
            async with session.get(f"{url}/{path}") as response:
                await response.read()
        async with session.get(f"{url}/status") as response:
            text = await response.text()
    rows = Texts(text)
    assert rows.behind("since the start") == "3"
    assert "absent" not in text
    assert "blob" not in text
    assert rows.texts[rows.texts.index("since the start") + 2] == "1"  # refused
    assert f"{2 * len(blob) / 1000:.3g} kB" in rows.texts


def test_rates_are_of_the_last_ten_seconds(page, clock):
    metrics = page._metrics
    for second in range(200):
        clock.now += 1
        for _ in range(5 if second < 150 else 2):
            metrics.begin()
            metrics.end("GET", 200, 0.01, 0.01)
            metrics.sent_bytes.inc(1000)
        page.look()
    shown = Texts(page.render())
    assert shown.behind("requests a second") == "2"
    assert shown.behind("sent") == "2 kB/s"
    assert shown.behind("last minute") == "150"
    assert shown.behind("since the start") == "850"
    assert "3 min 20 s" in page.render()
    labels = [each["aria-label"] for tag, each in shown.attributes if tag == "svg"]
    assert labels == [
        "Sent over the last two minutes: at most 5 kB/s, now 2 kB/s",
        "Requests over the last two minutes: at most 5 a second, now 2 a second",
    ]
    points = re.findall(r"[\d.]+,[\d.]+", next(each["points"] for tag, each in shown.attributes if tag == "polyline"))
    assert len(points) == 120


def test_failures_are_told_until_a_minute_has_passed(page, clock):
    metrics = page._metrics
    metrics.begin()
    metrics.end("GET", 503, 0.01, 0.01)
    for second in range(70):
        assert ("1 failures in the last minute" in page.render()) == (second < 61), second
        clock.now += 1
        page.look()
    assert "Nothing failed" in page.render()


def test_tiers_tell_hits(blob, clock):
    digest = hashlib.sha256(blob).hexdigest()
    key = f"v1/0123456789abcdef/0123456789abcdef/{digest[:2]}/{digest}.kvw"
    with closing(open_tiers(MemoryStore(), memory_bytes=1 << 22)) as tiers:
        tiers.put(key, blob)
        page = StatusPage(tiers, ServerMetrics(), lambda: clock.now)
        for _ in range(4):
            assert tiers.get(key, 0, 100) == blob[:100]
        shown, counted = Texts(page.render()), tiers.counters().memory
    assert counted.hits == 4  # what is put is held
    assert shown.behind("memory") == "4"
    assert f"{counted.hits / (counted.hits + counted.misses):.1%}" in shown.texts


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 min 0 s"), (61.5, "1 min 1 s"), (3720, "1 h 2 min"), (90000, "1 d 1 h")]
)
def test_durations(seconds, words):
    assert _duration(seconds) == words
