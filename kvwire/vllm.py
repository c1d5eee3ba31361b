"""kvwire in vLLM: a connector that loads linked documents into its pages, what its requests say, a proxy before it.

vLLM finds the connector as ``kv_connector="KvwireConnector"`` in ``kv_connector_module_path="kvwire.vllm"``. Only that
name needs vLLM.
"""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.engines.vllm.chat import chat_body
    from kvwire.engines.vllm.connector import KvwireConnector
    from kvwire.engines.vllm.extension import SavingWorker
    from kvwire.engines.vllm.proxy.application import ProxySettings, VllmProxy
    from kvwire.engines.vllm.proxy.bodies import BodyMaker, Wanted
    from kvwire.engines.vllm.requests import Choice, request_body, request_salt

__all__ = [
    "BodyMaker",
    "Choice",
    "KvwireConnector",
    "ProxySettings",
    "SavingWorker",
    "VllmProxy",
    "Wanted",
    "chat_body",
    "request_body",
    "request_salt",
]

__getattr__ = lazy(__name__)
