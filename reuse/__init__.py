"""Decoded caches to one linked prompt cache."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.reuse.assemble import LinkedPrompt, block_mask, link, moved
    from kvwire.reuse.compress import compute_cached, compute_piece, compute_stored
    from kvwire.reuse.edits.place import compute_holes, place_spans
    from kvwire.reuse.edits.script import EditScript, Span, align, combine_spans, common_spans
    from kvwire.reuse.layout import Anchors, LinkLayout, PromptLayout, Segment, SegmentKind, soft_token
    from kvwire.reuse.layout_presets import (
        PLAIN,
        anchors,
        block_attention,
        kvlink,
        read_layout,
        soft_links,
        turborag,
        wrappers,
    )
    from kvwire.reuse.link_repair import repair_laid_out
    from kvwire.reuse.link_rows import compute_links, link_documents
    from kvwire.reuse.link_shift import LinkShift, ShiftLearner
    from kvwire.reuse.repair.measured import measure_deviation
    from kvwire.reuse.repair.repairing import Repaired, repair_prompt, selector_of
    from kvwire.reuse.repair.rows import AttentionSummary, Narrowing, RowsEngine, checked_rows
    from kvwire.reuse.repair.selectors import SELECTORS
    from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, RepairInput, Selector, rows_for
    from kvwire.reuse.schema import Module, Parameter, Schema, SchemaPrompt, Union, fill_parameters, place_modules
    from kvwire.reuse.schema_json import read_schema
    from kvwire.reuse.soft_tokens import SoftTokens, as_stored, own_tokens, stored_tokens

__all__ = [
    "PLAIN",
    "SELECTORS",
    "Anchors",
    "AttentionSummary",
    "Chosen",
    "EditScript",
    "LinkLayout",
    "LinkShift",
    "LinkedPrompt",
    "Module",
    "Narrowing",
    "Parameter",
    "PromptLayout",
    "RepairCost",
    "RepairInput",
    "Repaired",
    "RowsEngine",
    "Schema",
    "SchemaPrompt",
    "Segment",
    "SegmentKind",
    "Selector",
    "ShiftLearner",
    "SoftTokens",
    "Span",
    "Union",
    "align",
    "anchors",
    "as_stored",
    "block_attention",
    "block_mask",
    "checked_rows",
    "combine_spans",
    "common_spans",
    "compute_cached",
    "compute_holes",
    "compute_links",
    "compute_piece",
    "compute_stored",
    "fill_parameters",
    "kvlink",
    "link",
    "link_documents",
    "measure_deviation",
    "moved",
    "own_tokens",
    "place_modules",
    "place_spans",
    "read_layout",
    "read_schema",
    "repair_laid_out",
    "repair_prompt",
    "rows_for",
    "selector_of",
    "soft_links",
    "soft_token",
    "stored_tokens",
    "turborag",
    "wrappers",
]

__getattr__ = lazy(__name__)
