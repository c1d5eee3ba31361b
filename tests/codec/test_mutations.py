"""Legal files that no encoder of ours writes, and damage: read as docs/format.md says, or refused, soon and cheaply.

``python -m tests.codec.fuzz`` (``make fuzz``) runs many more of the same mutants, each by its number.
"""

from __future__ import annotations

import os

import pytest

from kvwire.codec import inspect

from .fuzz import rounds
from .fuzz.damage import damage_blob
from .fuzz.workers import Tally

SEED = int(os.environ.get("KVWIRE_EXPLORE") or 0)
COUNT = 500


@pytest.fixture(scope="module")
def tally():
    rounds.warm_up()
    found = Tally()
    for number in range(COUNT):
        mutant = rounds.run(SEED, number)
        found.add(mutant)
        if mutant.outcome.finding:
            found.findings.append(f"{number}: {mutant.what}: {mutant.outcome.finding}")
    return found


def test_no_mutant_is_read_otherwise_than_the_format_says(tally):
    repeat = f"python -m tests.codec.fuzz --seed {SEED} --mutants 1 --first NUMBER keeps its bytes"
    assert not tally.findings, "\n".join([*tally.findings, repeat])


def test_mutants_reach_every_outcome(tally):
    """Damage that is always refused by the same check would prove nothing."""
    wanted = {f"{kind}: equal" for kind in ("legal_blob", "damaged_blob", "damaged_profile", "text", "sealed", "entry")}
    wanted |= {f"{kind}: CorruptError" for kind in ("damaged_blob", "damaged_profile", "text", "sealed", "entry")}
    wanted |= {"damaged_blob: FormatVersionError", "damaged_blob: unchecked"}
    if SEED:  # some seeds draw none of what is rare
        wanted -= {"damaged_blob: FormatVersionError", "text: CorruptError"}
    assert wanted <= set(tally.kinds)
    assert tally.kinds["damaged_blob: equal"] > COUNT // 20


def test_prefix_layers_are_among_the_mutants():
    rng, known = rounds.np.random.default_rng(0), 0
    for _ in range(60):
        made = rounds.some_blob(rng)
        known += made.hidden is not None and inspect(made.blob).prefix_layers > 0
    assert known > 3


def test_a_mutant_is_the_same_for_its_number():
    one, other = (rounds.run(7, 3) for _ in range(2))
    assert one.files == other.files
    assert one.files != rounds.run(8, 3).files


def test_damage_is_mended_mostly():
    """Checksums hold, so that what is behind them is reached."""
    rng, read = rounds.np.random.default_rng(0), 0
    for _ in range(100):
        blob = damage_blob(rng, rounds.golden()[0].blob)
        try:
            inspect(blob)
        except rounds.judge.KvwireError as error:
            read += "checksum" not in str(error)
        else:
            read += 1
    assert read > 60
