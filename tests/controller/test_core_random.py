"""The controller in random courses of events, against a model that knows what is allowed."""

from __future__ import annotations

import os

import pytest

from .courses import Course

COURSES = int(os.environ.get("KVWIRE_COURSES", "200"))
FIRST = int(os.environ.get("KVWIRE_EXPLORE") or 0) * 1_000_000
"""Seed of the first course; the others follow."""
PARTS = 8


@pytest.mark.parametrize(
    "seed", [11_000_186, 50_000_378, 50_002_203, 60_002_436, 996_724_830_000_074, 996_724_830_001_015]
)
def test_courses_that_once_broke_a_rule(seed):
    """Fewer levels, chunks decoded more coarsely than they came, slow refinements, plans twice at one instant."""
    Course(seed).play()


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_every_load_ends_once_and_no_rule_is_broken(part):
    for seed in range(FIRST + part, FIRST + COURSES, PARTS):
        try:
            Course(seed).play()
        except Exception as error:
            error.add_note(f"in course {seed}")
            raise
