"""Whatever goes wrong on the way ends in the right bytes or a clear error, in time."""

import asyncio
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvwire.store import S3Store, open_tiers
from kvwire.transport import HttpStore, open_session, open_source

from ..s3_servers import free_port, ministack

_FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, _FOLDER)
from fault_parts import network  # noqa: E402 - parts of a script in a folder beside the package
from fault_parts.local import (  # noqa: E402
    disk_that_becomes_read_only,
    full_disk,
    full_disk_tier,
    killed_reader,
    killed_writer,
)
from fault_parts.network import (  # noqa: E402
    BLOB,
    CHANGES,
    HTTP_SETTINGS,
    KEY,
    OUTLIVED_S,
    PROXIED,
    RIGHT,
    S3_SETTINGS,
    WHENS,
    WRONG,
    FaultKind,
    ProxyFault,
    Row,
    all_gets,
    all_ranges,
    changed_between,
    expired_address,
    fetched,
    http_benches,
    in_turns,
    nth,
    presigned_addresses,
    renewed_address,
    s3_benches,
    short_lived,
    signed_addresses,
    signed_bench,
    unreachable,
)

sys.path.remove(_FOLDER)

AT_A_TIME = 4


@pytest.fixture(scope="module", name="http_benches")
def http_benches_():
    with http_benches(AT_A_TIME) as benches:
        yield benches


@pytest.fixture(scope="module", name="s3_benches")
def s3_benches_(tmp_path_factory):
    with ministack(tmp_path_factory.mktemp("ministack")) as server, pytest.MonkeyPatch.context() as patch:
        server.set_environment(patch)
        with s3_benches(server, AT_A_TIME) as benches:
            yield benches


@pytest.fixture
def benches(request):
    return request.getfixturevalue(f"{request.param}_benches")


@pytest.mark.parametrize("benches", ["http", "s3"], indirect=True)
async def test_faults_while_blobs_are_fetched(benches):
    rows = await in_turns(all_ranges(), benches)
    assert not [row for row in rows if not row.holds]
    heal = {(case.name, WHENS[when]) for case in PROXIED for when in case.heals}
    assert not [row for row in rows if (row.fault, row.when) in heal and row.outcome != RIGHT]


@pytest.mark.parametrize("benches", ["http", "s3"], indirect=True)
async def test_faults_while_objects_are_got(benches):
    rows = await in_turns(all_gets(), benches)
    assert not [row for row in rows if not row.holds]


@pytest.fixture(name="signed_bench")
def signed_bench_(tmp_path):
    with signed_bench(tmp_path) as bench:
        yield bench


@pytest.fixture(name="short_lived")
def short_lived_(s3_benches):
    with short_lived(s3_benches[0]) as store:
        yield store


async def test_signed_urls_that_expire_are_renewed(signed_bench):
    row = await renewed_address(signed_bench, signed_addresses(signed_bench), "signed URL expires")
    assert row.outcome == RIGHT
    assert {401, 206} <= {record.status for record in signed_bench.proxy.records}


async def test_presigned_urls_that_expire_are_renewed(s3_benches, short_lived):
    before = len(s3_benches[0].proxy.records)
    row = await renewed_address(s3_benches[0], presigned_addresses(short_lived), "presigned URL expires")
    assert row.outcome == RIGHT
    assert {403, 206} <= {record.status for record in s3_benches[0].proxy.records[before:]}


async def test_a_store_renews_its_addresses_before_they_expire(s3_benches, short_lived):
    before = len(s3_benches[0].proxy.records)
    async with open_session() as session:
        source = open_source(short_lived, KEY, session)
        outcome, _ = await fetched(source, 12.0, between=partial(asyncio.sleep, OUTLIVED_S))
    assert outcome == RIGHT
    assert {record.status for record in s3_benches[0].proxy.records[before:]} == {206}


async def test_addresses_that_nobody_renews_are_an_error_of_credentials(s3_benches, short_lived, signed_bench):
    urls = [
        (s3_benches[0], short_lived.http_address(KEY).url),
        (signed_bench, signed_addresses(signed_bench)(False).url),
    ]
    rows = await asyncio.gather(*(expired_address(bench, url, "expires") for bench, url in urls))
    assert [row.outcome for row in rows] == ["AuthError", "AuthError"]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("benches", ["http", "s3"], indirect=True)
async def test_an_object_that_changes_while_it_is_fetched(benches, change):
    row = await changed_between(benches[0], "changed", change)
    # A server that takes a content-addressed key for a promise does not see the change: the checksums do.
    assert row.outcome in {"ReplacedError", "SegmentCorruptError (CorruptError)"}, row
    assert row.holds, row


@pytest.mark.parametrize("host", ["kvwire.invalid", "127.0.0.1"], ids=["unknown host", "nobody listens"])
async def test_hosts_that_cannot_be_reached(host, s3_benches):
    address = f"http://{host}:{free_port()}"
    with (
        closing(HttpStore(address, settings=HTTP_SETTINGS)) as http,
        closing(S3Store(s3_benches[0].store.url.replace(s3_benches[0].proxy.url, address), settings=S3_SETTINGS)) as s3,
    ):
        for store, kind in ((http, "http"), (s3, "s3")):
            for row in await unreachable(store, host, kind):
                assert row.outcome == "StorageError", row
                assert row.holds, row


def test_a_full_disk(tmp_path):
    row = full_disk(tmp_path / "s")
    assert row.outcome == "StorageError"
    assert row.holds


def test_a_full_disk_tier(tmp_path):
    row = full_disk_tier(tmp_path / "t")
    assert row.outcome == RIGHT
    assert row.holds


def test_a_disk_that_becomes_read_only(tmp_path):
    rows = disk_that_becomes_read_only(tmp_path / "disk")
    if not rows:
        pytest.skip("this machine does not let this user mount")
    assert [row.outcome for row in rows] == ["StorageError", RIGHT]
    assert all(row.holds for row in rows)


@pytest.mark.parametrize("kind", ["folder", "tiers, write-back"])
def test_a_writer_that_is_killed(kind, tmp_path):
    row = killed_writer(kind, tmp_path / "s", kills=2, seed=1)
    assert row.outcome == RIGHT
    assert row.attempts == 2
    assert row.holds


def test_an_uploader_that_is_killed(s3_benches):
    row = killed_writer("s3, multipart", s3_benches[0].origin.url.replace("matrix", "killed"), kills=2, seed=2)
    assert row.outcome == RIGHT
    assert row.attempts == 2
    assert row.holds


def test_a_reader_that_is_killed(tmp_path):
    row = killed_reader(tmp_path / "t", kills=2, seed=3)
    assert row.outcome == RIGHT
    assert row.attempts == 2
    assert row.holds


async def test_wrong_bytes_would_be_seen(http_benches, monkeypatch):
    monkeypatch.setattr(network, "BLOB", BLOB[:-1] + bytes([BLOB[-1] ^ 1]))
    monkeypatch.setattr(network, "PROFILE", b"another")
    async with open_session() as session:
        outcome, _ = await fetched(open_source(http_benches[0].store, KEY, session), 5.0)
    assert outcome.startswith(WRONG)
    row = Row("", "", "", outcome, 1, 0, 0.1, 5.0)
    assert not row.holds
    assert not replace(row, outcome=RIGHT, seconds=8.0).holds
    assert replace(row, outcome=RIGHT).holds


async def test_a_head_damaged_on_its_way_into_a_cache_is_fetched_again(http_benches):
    bench = http_benches[0]
    bench.begin(nth(ProxyFault(FaultKind.FLIP, after=100), 0))
    with closing(open_tiers(HttpStore(bench.proxy.url))) as tiers:
        async with open_session() as session:
            outcome, _ = await fetched(open_source(tiers, KEY, session), 5.0)
    assert outcome == RIGHT
