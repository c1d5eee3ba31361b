"""Sealed objects: what goes in comes out, whatever is changed is noticed, and ranges stay fetchable."""

import hashlib
import hmac
import struct
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from kvwire.codec import inspect, read_header
from kvwire.errors import ArgumentError, AuthError, CorruptError, FormatVersionError, NotFoundError, TruncatedError
from kvwire.store import Keyring, tenant_hash
from kvwire.store.crypto.sealing import PlainBlob, TenantKey, TenantKeys
from kvwire.types import SEALED_MAGIC

GOLDEN = Path(__file__).parent / "golden"
BLOBS = sorted(path.name for path in GOLDEN.glob("v*.kvw"))
MASTER = bytes(range(32))
ALICE = tenant_hash("alice")
KEYS = Keyring([MASTER]).tenant(ALICE)
PLACE = "v1/a/b/catalog/c.json"
SMALL = (GOLDEN / "v1.0-small.kvw").read_bytes()


@pytest.fixture(params=BLOBS)
def blob(request):
    return (GOLDEN / request.param).read_bytes()


def test_a_blob_comes_back_whole(blob):
    sealed = KEYS.seal_blob(blob)
    segments = sum(len(row) for row in read_header(blob).segments)
    assert len(sealed) == len(blob) + 64 + 16 * (1 + segments)
    assert sealed.startswith(SEALED_MAGIC)
    assert not blob.startswith(SEALED_MAGIC)
    assert KEYS.unseal_blob(sealed) == blob


def test_a_range_of_a_sealed_blob_is_a_segment(blob):
    """What a reader needs is the header and, in any order, any segment by its own range."""
    sealed, plain, reader = KEYS.seal_blob(blob), read_header(blob), KEYS.blob_reader()
    told = read_head_in_pieces(reader, sealed)
    assert reader.head == blob[: plain.header_bytes]
    assert told.file_bytes == len(sealed)
    assert (told.tokens, told.token_ids, told.meta) == (plain.tokens, plain.token_ids, plain.meta)
    cells = [(row, level) for row in range(plain.chunks) for level in range(len(plain.segments[row]))]
    for row, level in reversed(cells):
        there, here = told.segments[row][level], plain.segments[row][level]
        assert reader.check(there, sealed[there.offset : there.end]) == blob[here.offset : here.end]


def read_head_in_pieces(reader, data):
    length = 1
    while True:
        try:
            return reader.read_header(data[:length])
        except TruncatedError as error:
            wanted = error.needed
        assert length < wanted <= len(data)
        length = wanted


def test_levels_tell_what_a_reader_of_a_sealed_blob_fetches(blob):
    info = KEYS.blob_reader().read_header(KEYS.seal_blob(blob))
    for index, level in enumerate(info.levels):
        rows = [chunk for chunk in range(info.chunks) if len(info.segments[chunk]) > index]
        if len(rows) == info.chunks:
            assert level.cumulative_bytes == info.header_bytes + sum(info.chunk_bytes(chunk, index) for chunk in rows)
        assert level.bytes == sum(info.segments[chunk][index].stored for chunk in rows)


@given(st.integers(0, len(KEYS.seal_blob(SMALL)) - 1), st.integers(1, 255))
def test_every_changed_byte_of_a_blob_is_noticed(position, change):
    sealed = bytearray(KEYS.seal_blob(SMALL))
    sealed[position] ^= change
    with pytest.raises((CorruptError, FormatVersionError, AuthError)):  # AuthError: the key's name was changed
        KEYS.unseal_blob(bytes(sealed))


@given(st.integers(0, len(SMALL) + 400))
def test_every_shortened_blob_is_noticed(length):
    sealed = KEYS.seal_blob(SMALL)
    with pytest.raises(CorruptError):
        KEYS.unseal_blob(sealed[: min(length, len(sealed) - 1)])


def test_a_segment_is_no_other_segment_of_this_or_of_another_blob():
    sealed, reader, another = KEYS.seal_blob(SMALL), KEYS.blob_reader(), KEYS.blob_reader()
    with pytest.raises(ArgumentError, match="read_header"):
        reader.check(read_header(SMALL).segments[0][0], b"")
    info, foreign = reader.read_header(sealed), KEYS.seal_blob((GOLDEN / "v1.0-named.kvw").read_bytes())
    (first, second), third = info.segments[0][:2], info.segments[1][0]
    theirs = another.read_header(foreign).segments[0][0]
    for data in (sealed[second.offset : second.end], sealed[third.offset : third.end],
                 foreign[theirs.offset : theirs.end]):  # fmt: skip
        with pytest.raises(CorruptError, match="changed"):
            reader.check(first, data)


def test_sealing_is_deterministic_and_contents_do_not_share_keystreams():
    assert KEYS.seal(b"same", PLACE) == KEYS.seal(b"same", PLACE)
    one, other = KEYS.seal(bytes(64), PLACE), KEYS.seal(bytes(63) + b"\1", PLACE)
    shared = sum(a == b for a, b in zip(one[64:127], other[64:127], strict=True))
    assert shared < 10  # of 63 equal bytes of content


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 100_000])
def test_objects_come_back(size):
    content = hashlib.shake_128(b"x").digest(size)
    sealed = KEYS.seal(content, PLACE)
    assert len(sealed) == size + 80
    assert KEYS.unseal(sealed, PLACE) == content


@given(st.binary(max_size=100))
def test_what_is_not_sealed_is_refused(data):
    for call in (lambda d: KEYS.unseal(d, PLACE), KEYS.blob_reader().read_header):
        with pytest.raises((CorruptError, FormatVersionError)):
            call(data)


def test_an_object_opens_as_what_it_is_in_its_place_alone():
    for use in (
        lambda: KEYS.unseal(KEYS.seal_blob(SMALL), PLACE),
        lambda: KEYS.blob_reader().read_header(KEYS.seal(SMALL, PLACE)),
        lambda: KEYS.unseal_blob(KEYS.seal_blob(SMALL) + b"x"),
        lambda: KEYS.unseal(KEYS.seal(b"text", PLACE) + b"x", PLACE),
        lambda: PlainBlob().read_header(KEYS.seal_blob(SMALL)),
    ):
        with pytest.raises(CorruptError):
            use()
    with pytest.raises(CorruptError, match="changed"):
        KEYS.unseal(KEYS.seal(b"pointer", PLACE), "v1/a/other/catalog/c.json")


def test_no_two_messages_share_a_key():
    """Whatever differs, be it kind, place or content, the object id differs, and with it the key."""
    ids = {
        sealed[44:60]
        for sealed in (
            KEYS.seal(SMALL, PLACE),
            KEYS.seal(SMALL, PLACE + "x"),
            KEYS.seal(SMALL + b"x", PLACE),
            KEYS.seal_blob(SMALL),
        )
    }
    assert len(ids) == 4


def test_a_new_master_key_seals_the_old_one_still_opens_and_other_tenants_cannot():
    old, both = Keyring([MASTER]), Keyring([bytes(32), MASTER])
    assert both.tenant("a").unseal(old.tenant("a").seal(b"x", PLACE), PLACE) == b"x"
    with pytest.raises(AuthError):
        old.tenant("a").unseal(both.tenant("a").seal(b"x", PLACE), PLACE)
    with pytest.raises(AuthError, match="tenant's name"):
        old.tenant("bob").unseal(old.tenant("alice").seal(b"secret", PLACE), PLACE)


def test_a_plain_reader_reads_plain_blobs(blob):
    reader = PlainBlob()
    assert reader.read_header(blob) == inspect(blob)
    assert reader.parsed.info == read_header(blob)


def test_keys_do_not_print_themselves():
    assert MASTER.hex() not in repr(Keyring([MASTER]))
    key = TenantKey(bytes(16), MASTER)
    assert "key=" not in repr(key)
    assert repr(MASTER) not in repr(key)


@pytest.mark.parametrize(("key_id", "key"), [(bytes(15), MASTER), (bytes(16), bytes(31))])
def test_what_is_no_key_is_refused(key_id, key):
    with pytest.raises(ArgumentError):
        TenantKey(key_id, key)
    with pytest.raises(ArgumentError):
        TenantKeys([])


# The keyring's file.


def written(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_keyring_file(tmp_path):
    first, second, path = Keyring.new_line(), Keyring.new_line(), tmp_path / "keys"
    assert first != second
    ring = Keyring.read(written(path, f"# newest first\n\n{second}\n{first}\n"))
    old = Keyring.read(written(path, first))
    assert ring.tenant("t").unseal(old.tenant("t").seal(b"x", PLACE), PLACE) == b"x"
    with pytest.raises(AuthError, match="chmod 600"):
        Keyring.read(written(path, first, 0o644))
    with pytest.raises(NotFoundError):
        Keyring.read(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "A" * 44, "AAAA" * 16])
def test_a_file_that_is_no_keyring(tmp_path, text):
    with pytest.raises(ArgumentError, match="kvwire key"):
        Keyring.read(written(tmp_path / "keys", text))


# The format, by its text alone.


def hkdf(key, info, salt=None):
    return HKDF(SHA256(), 32, salt, info).derive(key)


def test_the_text_of_the_format_suffices_to_open_the_golden_file():
    sealed = (GOLDEN / "sealed-v1.0-small.kve").read_bytes()
    magic, major, minor, flags, file_bytes, header_bytes, key_id, object_id, kind = struct.unpack_from(
        "<8sHHIQI16s16sI", sealed
    )
    assert (magic, major, minor, flags, kind) == (b"\x89KVE\r\n\x1a\n", 1, 0, 0, 1)
    assert file_bytes == len(sealed)
    tenant = hkdf(MASTER, b"kvwire tenant key\0" + ALICE.encode())
    assert key_id == hkdf(tenant, b"kvwire key id")[:16]
    cipher = AESGCM(hkdf(tenant, b"kvwire object key", object_id))
    position = 64 + header_bytes + 16
    head = cipher.decrypt(bytes(12), sealed[64:position], sealed[:64])
    assert head == SMALL[:header_bytes]
    content = head
    for number, segment in enumerate((s for row in read_header(head).segments for s in row), 1):
        part = sealed[position : position + segment.stored + 16]
        content += cipher.decrypt(struct.pack("<QI", number, 0), part, None)
        position += len(part)
    assert content == SMALL
    prologue = sealed[:44] + bytes(16) + sealed[60:64]
    told = prologue + hashlib.sha256(b"").digest() + hashlib.sha256(content).digest()
    named = hmac.digest(tenant, b"kvwire object id" + told, "sha256")
    assert object_id == named[:16]


def test_the_golden_file_is_what_sealing_gives_today():
    assert KEYS.seal_blob(SMALL) == (GOLDEN / "sealed-v1.0-small.kve").read_bytes()
