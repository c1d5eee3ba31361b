"""Placeholders in OpenAI's requests, and the text around them. No store and no tokenizer is asked here."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PLACEHOLDER = re.compile(r"\{\{kvwire:([^{}\n]{1,512})\}\}")
_PLAIN_ROLES = ("system", "developer", "user", "assistant", "tool")


class RequestError(Exception):
    """A request that cannot be served as it is.

    Attributes:
        status: Of the answer.
        code: A word for programs.
        param: The field that is wrong; None: none is.
    """

    def __init__(
        self, message: str, status: int = 400, code: str = "invalid_request", param: str | None = None
    ) -> None:
        """Keep the parts of OpenAI's error object."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class Cut:
    """A text in which documents stand."""

    before: str  # the text before the first of them
    # ids that follow one another there, with nothing but white space between, which is left out
    documents: tuple[str, ...]
    after: str  # the text behind these; further placeholders are still in it


def names_in(text: str) -> list[str]:
    """Ids of the documents that a text has placeholders of."""
    return [each.strip() for each in _PLACEHOLDER.findall(text)]


def cut(text: str) -> Cut:
    """Cut a text at its first placeholders."""
    found = list(_PLACEHOLDER.finditer(text))
    count = 1
    while count < len(found) and not text[found[count - 1].end() : found[count].start()].strip():
        count += 1
    run = found[:count]
    names = tuple(each[1].strip() for each in run)
    return Cut(text[: run[0].start()], names, text[run[-1].end() :])


def filled(text: str, text_of: Callable[[str], str]) -> str:
    """Put documents' texts in place of placeholders."""
    return _PLACEHOLDER.sub(lambda found: text_of(found[1].strip()), text)


def placeholder(name: str) -> str:
    """What stands for a document."""
    return f"{{{{kvwire:{name}}}}}"


def texts_of(messages: object) -> list[str]:
    """The texts of a chat's messages, in which placeholders may stand; wrong messages are left to vLLM."""
    found = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        found += [each if isinstance(each, str) else _text_part(each) for each in parts]
    return [each for each in found if each]


def _text_part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else ""


def flattened(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are single texts, joined as vLLM joins them."""
    flat = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _PLAIN_ROLES:
            msg = f"messages[{number}] has no role that a chat with documents can have: {', '.join(_PLAIN_ROLES)}"
            raise RequestError(msg, param="messages")
        content = message.get("content")
        if isinstance(content, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                msg = f"messages[{number}] holds more than text: documents are linked in chats of text alone"
                raise RequestError(msg, param="messages")
            content = "\n".join(_text_part(part) for part in content)
        if content is not None and not isinstance(content, str):
            raise RequestError(f"messages[{number}].content is a text", param="messages")
        flat.append(message | {"content": content})
    return flat


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to a template: arguments of calls are objects there, not texts."""
    out = []
    for message in messages:
        copied = deepcopy(dict(message))
        copied["content"] = copied.get("content") or ""
        for call in copied.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(function, dict) and isinstance(arguments, str):
                try:
                    function["arguments"] = json.loads(arguments or "{}")
                except ValueError:
                    raise RequestError("arguments of a tool call are JSON", param="messages") from None
        out.append(copied)
    return out


def tools_of(body: Mapping[str, Any]) -> list[Any] | None:
    """Tools as vLLM hands them to a template."""
    if not body.get("tools"):
        return None
    tools: list[Any] = []
    for tool in body["tools"] if isinstance(body["tools"], list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise RequestError("tools are objects with a function", param="tools")
        named = {name: function.get(name) for name in ("name", "description", "parameters")}
        tools.append({"type": "function", "function": named | function})
    return tools


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """What else of a chat's request reaches its template."""
    own, effort = body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
    if not isinstance(own, dict):
        raise RequestError("chat_template_kwargs is an object", param="chat_template_kwargs")
    if body.get("chat_template") or "chat_template" in own:
        msg = "a chat with documents is rendered by the model's own template: leave chat_template out"
        raise RequestError(msg, param="chat_template")
    more = {"documents": body.get("documents"), "reasoning_effort": effort} | (
        {} if effort is None or "enable_thinking" in own else {"enable_thinking": effort != "none"}
    )
    options = {"add_generation_prompt": body.get("add_generation_prompt", True)} | own
    if body.get("continue_final_message"):
        options["continue_final_message"] = True
    return options | {name: value for name, value in more.items() if value is not None}
