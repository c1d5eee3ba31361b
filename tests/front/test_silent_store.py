"""``kvwire ask --deadline`` over a real server of which some requests, or all, are never answered."""

import re

import pytest

from kvwire.store import FolderStore

from ..fault_proxy import FaultKind, FaultProxy, ProxyFault
from ..http_servers import serving

NEVER = ProxyFault(FaultKind.SILENT)


@pytest.fixture
def asked(run, demo_model, documents, tmp_path, monkeypatch):
    """Asks a question before a deadline, where requests for paths of a pattern hang."""
    monkeypatch.setenv("KVWIRE_ESTIMATES", str(tmp_path / "estimates.json"))
    name = next(iter(documents))
    path, store = demo_model.parent / "documents" / f"{name}.txt", f"file://{tmp_path}/store"
    options = ("--model", demo_model, "--question", "It was plain", "--tokens", 2, "--docs", name)
    assert run("encode", path, "--model", demo_model, "--store", store)[0] == 0
    assert run("ask", *options, "--store", store)[0] == 0  # costs are known from here on

    def ask(pattern, deadline_s, *more):
        with (
            serving(FolderStore(tmp_path / "store")) as url,
            FaultProxy(url, lambda request: NEVER if re.search(pattern, request.path) else None) as proxy,
        ):
            return run("ask", *options, "--store", proxy.url, "--deadline", deadline_s, *more)

    ask.texts = path
    return ask


@pytest.mark.parametrize("pattern", [".", "/catalog/doc/"], ids=["everything", "entries"])
def test_a_catalog_that_hangs_is_told_by_the_deadline(asked, pattern):
    code, _, err = asked(pattern, 2.5)
    assert (code, err.count("the store did not answer within 2.5 s; check it and the network")) == (7, 1)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("/catalog/profile", ""),
        ("/profiles/", "its profile did not come within 5 s"),
        (r"\.kvw$", "no header within 2.5 s"),
        (r"\.kvt$", ""),
        ("/catalog/model", ""),
        ("link", ""),
    ],
    ids=["profile in use", "profile", "blob", "text", "model record", "links"],
)
def test_what_a_text_stands_in_for_is_done_without(asked, pattern, told):
    code, out, err = asked(pattern, 10)
    assert (code, told in err) == (0, True)
    assert "first token after" in out


def test_a_text_that_is_at_hand_is_computed_where_all_hangs(asked):
    code, out, err = asked(".", 10, "--texts", asked.texts)
    assert (code, "the store did not answer within 2.5 s" in err) == (0, True)
    assert "recompute" in out
