"""Texts, sealed objects and catalog entries: made and read by docs/format.md, and damaged."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import zlib

import numpy as np
import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .. import surgery as cut
from .damage import BYTES, edit
from .makers import pack_ids
from .writers import frame

TEXT_FIELDS = cut.laid_out("magic:Q major:H minor:H incompatible:I crc:I tokens:I stored:I id_bits:B")
SEALED_FIELDS = cut.laid_out("magic:Q major:H minor:H incompatible:I file_bytes:Q head_bytes:I")
TENANT_KEY, KEY_ID = bytes(range(32)), bytes(range(16))
PLACE = "v1/a/b/catalog/c.json"


# Texts (section 8).


def make_text(rng):
    """Any text that the format allows."""
    tokens = int(rng.choice([1, 2, 7, 300]))
    ids = np.full(tokens, 5) if rng.random() < 0.2 else rng.integers(0, 2 ** int(rng.integers(1, 33)), tokens)
    bits, raw = pack_ids(rng, ids, tokens)
    packed = frame(rng, raw)
    is_frame = len(packed) < len(raw) <= 256 * len(packed) and rng.random() < 0.7
    stored = packed if is_frame else raw
    head = b"\x89KVT\r\n\x1a\n" + struct.pack("<HHIIIIB3x", 1, int(rng.integers(3)), 0, 0, tokens, len(stored), bits)
    return mended_text(head + stored)


def mended_text(data):
    """The text with its checksum made right."""
    if len(data) < 32:
        return data
    return cut.put(data, TEXT_FIELDS, "crc", zlib.crc32(cut.put(data, TEXT_FIELDS, "crc", 0)))


def damage_text(rng, data):
    how = rng.choice([*BYTES, *[lambda rng, data: edit(rng, data, TEXT_FIELDS)] * 3])
    data = how(rng, data)
    if rng.random() < 0.2 and len(data) > 32:
        data = cut.put(data, TEXT_FIELDS, "stored", len(data) - 32)
    return mended_text(data) if rng.random() < 0.9 else data


def read_text_by_the_text(data):
    """Token ids."""
    tokens, stored, bits = struct.unpack_from("<IIB", data, 20)
    body, size = data[32:], -(-tokens * bits // 8)
    assert len(body) == stored
    raw = body if stored == size else zstandard.ZstdDecompressor().decompress(body)
    assert len(raw) == size
    whole = int.from_bytes(raw, "little")
    return tuple(whole >> at * bits & (1 << bits) - 1 for at in range(tokens))


# Sealed objects (section 9).


def cipher_of(object_id):
    derived = HKDF(algorithm=SHA256(), length=32, salt=object_id, info=b"kvwire object key").derive(TENANT_KEY)
    return AESGCM(derived)


def nonce(part):
    return struct.pack("<QI", part, 0)


def seal_parts(prologue, place, parts):
    """Parts sealed under any prologue of 64 bytes: what it claims need not be so."""
    cipher = cipher_of(prologue[44:60])
    first = cipher.encrypt(nonce(0), parts[0], prologue + place)
    return prologue + first + b"".join(cipher.encrypt(nonce(n), part, None) for n, part in enumerate(parts[1:], 1))


def parts_of(blob):
    """Head and segments in payload order."""
    at = cut.get(blob, cut.BLOB_FIELDS, "head_bytes")
    out = [blob[:at]]
    for cell in range(cut.cells(blob)):
        offset, stored, *_ = cut.ENTRY.unpack_from(blob, cut.index_at(blob) + 32 * cell)
        if offset < 2**64 - 1:
            out.append(blob[offset : offset + stored])
    return out


def make_sealed(rng, content, *, is_blob):
    """A sealed blob or object; some claim another length or kind than they have, or another key."""
    parts = parts_of(content) if is_blob else [content]
    size = 64 + len(content) + 16 * len(parts)
    known = struct.pack("<HHIQI", 1, int(rng.integers(3)), 0, size, len(parts[0])) + KEY_ID
    magic, kind = b"\x89KVE\r\n\x1a\n", struct.pack("<I", int(is_blob))
    place = b"" if is_blob else PLACE.encode()
    told = hashlib.sha256(place).digest() + hashlib.sha256(content).digest()
    zeroed = magic + known + bytes(16) + kind
    object_id = hmac.digest(TENANT_KEY, b"kvwire object id" + zeroed + told, "sha256")[:16]
    return magic + known + object_id + kind, place, parts


def damage_sealed(rng, prologue, place, parts):
    """Prologue, order of the parts or bytes changed; tags are made of what was changed, so they hold."""
    how = rng.integers(5)
    if how == 0:
        prologue = edit(rng, prologue, SEALED_FIELDS)
    elif how == 1:
        prologue = rng.choice(BYTES[:2])(rng, prologue)[:64].ljust(64, b"\0")
    elif how == 2 and len(parts) > 1:
        at = int(rng.integers(1, len(parts)))
        parts = [*parts[:at], *parts[at + 1 :]] if rng.random() < 0.5 else [parts[0], *parts[:0:-1]]
    elif how == 3:
        return rng.choice(BYTES)(rng, seal_parts(prologue, place, parts))
    else:
        place += b"x"
    return seal_parts(prologue, place, parts)


def unseal_by_the_text(sealed, *, is_blob):
    """The plain bytes of what readers may not refuse; None where a tag is wrong."""
    head_bytes = cut.get(sealed, SEALED_FIELDS, "head_bytes")
    cipher, at = cipher_of(sealed[44:60]), 64 + head_bytes + 16
    try:
        out = cipher.decrypt(nonce(0), sealed[64:at], sealed[:64] + (b"" if is_blob else PLACE.encode()))
        cells = range(cut.cells(out) if is_blob else 0)
        entries = [cut.ENTRY.unpack_from(out, cut.index_at(out) + 32 * cell) for cell in cells]
        for number, length in enumerate([stored for offset, stored, *_ in entries if offset < 2**64 - 1], 1):
            out += cipher.decrypt(nonce(number), sealed[at : at + length + 16], None)
            at += length + 16
    except InvalidTag:
        return None
    assert at == len(sealed)
    return out


# Catalog entries (docs of `store/records.py`).


def make_entry(rng):
    """A document's blob, or its text alone."""
    digest = hashlib.sha256(rng.bytes(4)).hexdigest()
    name = str(rng.choice(["a", "ü/☃ \x00", "x" * 400]))
    fields = {"document_id": name, "tokens": int(rng.integers(1, 2**40)), "token_digest": digest}
    if rng.random() < 0.3:
        fields |= {"blob_key": "", "sha256": "", "size": 0, "head_bytes": 0, "profile_digest": "", "levels": []}
    else:
        size = int(rng.integers(1, 2**50))
        levels = [[str(level), int(rng.integers(size + 1))] for level in range(rng.integers(4))]
        key = f"v1/{digest[:32]}/{digest}/blobs/{digest}.kvw"
        fields |= {"blob_key": key, "sha256": digest, "size": size, "head_bytes": int(rng.integers(size + 1))}
        fields |= {"profile_digest": digest if rng.random() < 0.5 else "", "levels": levels}
    if rng.random() < 0.3:
        fields["unknown"] = [{"x": 1.5}]
    return json.dumps(fields, ensure_ascii=bool(rng.integers(2))).encode()
