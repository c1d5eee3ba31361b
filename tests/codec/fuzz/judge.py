"""What reading a mutant comes to: a kvwire error, what the decoder of docs/format.md makes of it, or a finding."""

from __future__ import annotations

import json
import time
import tracemalloc
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch

from kvwire.codec import decode, encode, inspect, read_profile
from kvwire.codec.format.texts import read_text
from kvwire.errors import CacheValueError, KvwireError
from kvwire.store.crypto.sealing import TenantKey, TenantKeys
from kvwire.store.records import CatalogEntry

from ..by_the_text import LOSSLESS, TextPredictor, UndefinedError
from .makers import Made
from .wrappings import KEY_ID, PLACE, TENANT_KEY, read_text_by_the_text, unseal_by_the_text

MOST_SECONDS, MOST_BYTES, MOST_CACHE = 5.0, 64 << 20, 4 << 20
"""What one reading may cost: seconds of its thread, traced bytes, and the cache that callers are ready to hold."""
KEYS = TenantKeys([TenantKey(KEY_ID, TENANT_KEY)])
LEAST = 2.0**-100
"""Below this float32 has few bits left, or none."""


@dataclass(frozen=True)
class Outcome:
    """How a mutant ended.

    Attributes:
        kind: An error's name, ``equal``, or ``undefined`` where the text leaves the result open.
        finding: What is wrong with the product, in words; empty where nothing is.
        seconds: Of the product's thread.
        bytes: Peak of what the product allocated; 0 where that was not traced.
    """

    kind: str
    finding: str = ""
    seconds: float = 0.0
    bytes: int = 0


def measured(work):
    """The result or error of the product's work, with what it cost; memory only where it is traced."""
    before, result, kind, finding = traced(), None, "", ""
    started = time.thread_time()
    try:
        result = work()
    except KvwireError as error:
        kind = type(error).__name__
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        kind, finding = type(error).__name__, f"{type(error).__name__}: {error}"
    seconds = time.thread_time() - started
    peak = tracemalloc.get_traced_memory()[1] - before
    if not finding and (seconds > MOST_SECONDS or peak > MOST_BYTES):
        finding = f"it took {seconds:.1f} s and {peak} bytes"
    return result, Outcome(kind, finding, seconds, peak)


def traced():
    """Bytes that are allocated by now, where they are traced; the peak begins anew."""
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]


def compared(outcome, check):
    """The outcome, or where the product accepted the mutant, what a comparison with the text's reader says."""
    if outcome.kind or outcome.finding:
        return outcome
    try:
        trouble = check()
    except UndefinedError:
        return replace(outcome, kind="undefined")
    except Exception as error:  # noqa: BLE001 - the text cannot be read so
        trouble = f"accepted, but by the text: {type(error).__name__}: {error}"
    return replace(outcome, kind="equal", finding=trouble)


def refused_though_legal(outcome, *, legal):
    """The outcome; a finding where nothing was wrong with what was refused."""
    if legal and not outcome.finding and outcome.kind not in {"equal", "undefined"}:
        return replace(outcome, finding=f"refused with {outcome.kind}, but all about it is legal")
    return outcome


def judge_blob(made: Made, level, offset, *, check=True):
    """One level of a blob, placed at an offset."""

    def work():
        inspect(made.blob)
        profile = read_profile(made.profile) if made.profile else None
        hidden = None if made.hidden is None else torch.from_numpy(made.hidden)
        exact = stays(made.blob, level, offset)
        dtype = None if exact else torch.float32
        how = {"offset": offset, "check": check, "hidden": hidden, "threads": 1, "dtype": dtype}
        return decode(made.blob, level, profile, max_bytes=MOST_CACHE, **how)

    cache, outcome = measured(work)
    if not check:
        return outcome if outcome.kind else replace(outcome, kind="unchecked")
    outcome = compared(outcome, lambda: unlike(made, cache, level, offset))
    return refused_though_legal(outcome, legal=made.legal and not is_moved_nonsense(outcome, made, level))


@lru_cache(4)
def info_of(blob):
    """What a blob says about itself; not measured."""
    return inspect(blob)


def stays(blob, level, offset):
    """Whether a level's numbers are wanted where they are stored, bit for bit."""
    levels = info_of(blob).levels[level:][:1]
    return bool(levels) and levels[0].lossless and TextPredictor.offset_of(blob) == offset


def is_moved_nonsense(outcome, made, level):
    """Lossless levels hold NaN and infinity bit for bit, but do not move them."""
    return outcome.kind == CacheValueError.__name__ and info_of(made.blob).levels[level].lossless


def unlike(made, cache, level, offset):
    """Where the product and the text's decoder disagree; empty where they do not."""
    text = TextPredictor(made.blob, made.profile, None if made.hidden is None else made.hidden.astype(np.float64))
    level %= text.level_count
    exact = stays(made.blob, level, offset)
    with np.errstate(all="ignore"):  # what is beyond float64 is beyond float32; NaN of a payload is NaN
        found = text.decode_with_noise(level, offset)
        rounding = 2.0**-22 if text.head["levels"][level][1] == LOSSLESS else 0.0
        if len(found) != 2 * sum(spec.kind != "none" for spec in cache.meta.layers):
            return "another number of planes"
        for (side, layer), (part, noise) in found.items():
            ours = (cache.keys if side == "key" else cache.values)[layer].double().numpy()
            trouble = differs(ours, part, None if exact else noise + rounding * abs(part) + LEAST)
            if trouble:
                return f"{side} {layer} {trouble}"
    return ""


def differs(ours, part, noise):
    """Where two planes are further apart than noise allows, or not equal where there is none; empty elsewhere."""
    if ours.shape != part.shape:
        return f"has shape {ours.shape}, by the text {part.shape}"
    if noise is None:
        return "" if np.array_equal(ours, part, equal_nan=True) else "is not equal to the bit"
    known = np.isfinite(noise) & np.isfinite(part) & (abs(part) < 2.0**126)
    far = known & ~(abs(ours - part) <= noise)
    if not far.any():
        return ""
    at = tuple(int(each[0]) for each in np.nonzero(far))
    return f"{at}: {ours[at]}, by the text {part[at]} with noise {noise[at]:.2g}"


def judge_profile(data, make_blob, cache, hidden, *, legal):
    """A profile: what is coded with it, by the text and by the product, decodes alike."""
    profile, outcome = measured(lambda: read_profile(data))
    if outcome.kind or outcome.finding:
        return refused_though_legal(outcome, legal=legal)
    if profile.data != data:
        return replace(outcome, kind="equal", finding="its bytes are not those that were read")
    made = make_blob()
    if made is not None:
        got = judge_blob(made, -1, 0)
        if got.finding or cache is None:
            return got
    blob, outcome = measured(lambda: encode(cache, profile, hidden=hidden, threads=1, chunk_tokens=16))
    if outcome.kind or outcome.finding:
        return outcome
    return judge_blob(Made(blob, data, None if hidden is None else hidden.numpy(), legal=False), -1, 0)


def judge_text(data, *, legal):
    ids, outcome = measured(lambda: read_text(data))
    outcome = compared(outcome, lambda: "" if ids == read_text_by_the_text(data) else "other token ids")
    return refused_though_legal(outcome, legal=legal)


def judge_sealed(sealed, *, is_blob, legal):
    """What opens is what the text opens; a blob's head by itself tells of the same segments."""
    how = KEYS.unseal_blob if is_blob else partial(KEYS.unseal, place=PLACE)
    plain, outcome = measured(lambda: how(sealed))
    outcome = compared(
        outcome, lambda: "" if plain == unseal_by_the_text(sealed, is_blob=is_blob) else "other plain bytes"
    )
    return refused_though_legal(outcome, legal=legal)


def judge_entry(data, *, legal):
    """An entry says what its JSON says, and says it again."""
    entry, outcome = measured(lambda: CatalogEntry.from_json(data))

    def check():
        fields, again = json.loads(data), json.loads(entry.to_json())
        if CatalogEntry.from_json(entry.to_json()) != entry:
            return "another entry from its own JSON"
        return "" if all(fields[name] == again[name] for name in again) else "other fields than those written"

    return refused_though_legal(compared(outcome, check), legal=legal)
