"""Decoded caches to one linked prompt cache."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.reuse.assemble import LinkedPrompt, block_mask, link, moved
    from kvwire.reuse.repair.measured import measure_deviation
    from kvwire.reuse.repair.repairing import Repaired, repair_prompt, selector_of
    from kvwire.reuse.repair.rows import Narrowing, RowsEngine, checked_rows
    from kvwire.reuse.repair.selectors import SELECTORS
    from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, RepairInput, Selector, rows_for

__all__ = [
    "SELECTORS",
    "Chosen",
    "LinkedPrompt",
    "Narrowing",
    "RepairCost",
    "RepairInput",
    "Repaired",
    "RowsEngine",
    "Selector",
    "block_mask",
    "checked_rows",
    "link",
    "measure_deviation",
    "moved",
    "repair_prompt",
    "rows_for",
    "selector_of",
]

__getattr__ = lazy(
    __name__,
    {
        "kvwire.reuse.assemble": ("LinkedPrompt", "block_mask", "link", "moved"),
        "kvwire.reuse.repair.measured": ("measure_deviation",),
        "kvwire.reuse.repair.repairing": ("Repaired", "repair_prompt", "selector_of"),
        "kvwire.reuse.repair.rows": ("Narrowing", "RowsEngine", "checked_rows"),
        "kvwire.reuse.repair.selectors": ("SELECTORS",),
        "kvwire.reuse.repair.selectors.base": ("Chosen", "RepairCost", "RepairInput", "Selector", "rows_for"),
    },
)
