"""vLLM's pages, without vLLM: where tokens lie in them, and how caches get there."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.engines.vllm.pages import (
        PackedPages,
        Pages,
        StridedPages,
        learn_order,
        probe,
        slots_of,
        write_reference,
    )

__all__ = [
    "PackedPages",
    "Pages",
    "StridedPages",
    "learn_order",
    "probe",
    "slots_of",
    "write_reference",
]

__getattr__ = lazy(
    __name__,
    {
        "kvwire.engines.vllm.pages": (
            "PackedPages",
            "Pages",
            "StridedPages",
            "learn_order",
            "probe",
            "slots_of",
            "write_reference",
        ),
    },
)
