"""docs/controller.md says what the code does."""

import re
from pathlib import Path
from typing import get_args

from kvwire.controller import Objective
from kvwire.controller import events as ev
from kvwire.controller.chunk_table import MOVES, ChunkState

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "controller.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return found


def rows(text: str) -> list[list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [row for row in cells if not set(row[0]) <= {"-"}]


def test_the_table_of_states_is_the_table_of_moves():
    told = {row[0]: row[1] for row in rows(section("States of a chunk"))[1:]}
    assert told == {
        state.name.lower(): ", ".join(after.name.lower() for after in sorted(MOVES[state])) for state in ChunkState
    }


def test_every_event_and_instruction_is_told_and_no_other():
    named = [re.findall(r"`(\w+)`", row[0]) for row in rows(section("Events and instructions"))]
    known = [kind.__name__ for kind in (*get_args(ev.Event), *get_args(ev.Instruction))]
    assert sorted(name for row in named for name in row) == sorted(known)


def test_every_objective_is_told():
    assert [row[0].strip("`") for row in rows(section("Goals"))[1:]] == list(get_args(Objective))


def test_files_that_are_named_exist():
    root = Path(__file__).resolve().parents[2]
    for name in set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", TEXT)):
        assert any((root / room / name).is_file() for room in ("", "controller")), name
