"""kvwire in vLLM: a connector that loads linked documents into its pages, and what its requests say.

vLLM finds the connector as ``kv_connector="KvwireConnector"`` in ``kv_connector_module_path="kvwire.vllm"``. Only that
name needs vLLM.
"""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.vllm.connector import KvwireConnector
    from kvwire.vllm.requests import Choice, request_body, request_salt

__all__ = [
    "Choice",
    "KvwireConnector",
    "request_body",
    "request_salt",
]

__getattr__ = lazy(
    __name__,
    {
        "kvwire.vllm.connector": ("KvwireConnector",),
        "kvwire.vllm.requests": ("Choice", "request_body", "request_salt"),
    },
)
