"""Decoded caches to one linked prompt cache."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.reuse.assemble import LinkedPrompt, block_mask, link, moved
    from kvwire.reuse.repair.measured import measure_deviation
    from kvwire.reuse.repair.repairing import Repaired, repair_prompt, selector_of
    from kvwire.reuse.repair.rows import Narrowing, RowsEngine, Seen, checked_rows
    from kvwire.reuse.repair.selectors import SELECTORS
    from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, RepairInput, Selector, rows_for
    from kvwire.reuse.schema import Module, Parameter, Schema, SchemaPrompt, Union, fill_parameters, place_modules
    from kvwire.reuse.schema_json import read_schema

__all__ = [
    "SELECTORS",
    "Chosen",
    "LinkedPrompt",
    "Module",
    "Narrowing",
    "Parameter",
    "RepairCost",
    "RepairInput",
    "Repaired",
    "RowsEngine",
    "Schema",
    "SchemaPrompt",
    "Seen",
    "Selector",
    "Union",
    "block_mask",
    "checked_rows",
    "fill_parameters",
    "link",
    "measure_deviation",
    "moved",
    "place_modules",
    "read_schema",
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
        "kvwire.reuse.repair.rows": ("Narrowing", "RowsEngine", "Seen", "checked_rows"),
        "kvwire.reuse.repair.selectors": ("SELECTORS",),
        "kvwire.reuse.repair.selectors.base": ("Chosen", "RepairCost", "RepairInput", "Selector", "rows_for"),
        "kvwire.reuse.schema": (
            "Module",
            "Parameter",
            "Schema",
            "SchemaPrompt",
            "Union",
            "fill_parameters",
            "place_modules",
        ),
        "kvwire.reuse.schema_json": ("read_schema",),
    },
)
