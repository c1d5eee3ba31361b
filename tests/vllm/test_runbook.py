"""The runbook and its dashboard name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvwire.engines.vllm.counting import COUNTED
from kvwire.engines.vllm.proxy.counting import ProxyMetrics
from kvwire.transport.server.metrics import ServerMetrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
_METRIC = re.compile(r"(?:vllm:)?kvwire_[a-z_]+|vllm:[a-z_]+")
_PARTS = re.compile(r"_(?:bucket|count|sum|total|created)$")


def existing():
    """Names of metrics as Prometheus knows them, without what it appends."""
    pages = (ProxyMetrics().render(), ServerMetrics().render())
    own = {line.split()[2] for page in pages for line in page.decode().splitlines() if line.startswith("# TYPE")}
    return {_PARTS.sub("", name) for name in own} | {f"vllm:kvwire_{name}" for name in COUNTED}


@pytest.mark.parametrize("page", ["dashboard.json", "runbook.md"])
def test_it_names_only_metrics_that_exist(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = {_PARTS.sub("", name) for name in _METRIC.findall(text) if not name.endswith("_")}
    assert len(named) >= 8
    assert named <= existing()


def test_the_dashboard_is_one_and_shows_what_the_runbook_alerts_on():
    dashboard = json.loads((DOCS / "dashboard.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    alerts = (DOCS / "runbook.md").read_text(encoding="utf-8").partition("## What to alert on")[2].partition("##")[0]
    shown = {name for each in expressions for name in _METRIC.findall(each)}
    assert set(_METRIC.findall(alerts)) <= shown


def test_the_runbook_is_short():
    assert len((DOCS / "runbook.md").read_text(encoding="utf-8").split()) <= 600
