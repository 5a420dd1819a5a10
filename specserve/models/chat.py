"""Chat messages from untrusted input, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.core.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_TEXT_PARTS = ("text", "input_text", "output_text")


def _fail(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", param=name)


def checked_messages(messages: Any, name: str = "messages") -> list[dict[str, Any]]:
    """A copy of the messages with every content as one text.

    Raises:
        InvalidRequestError: names the field at fault, such as messages[1].content.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise _fail(name, "must be a list of at least one message")
    return [_checked_message(message, f"{name}[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _fail(name, "must be an object with role and content")
    for key in message:
        if key not in _KEYS:
            raise _fail(f"{name}.{key}", f"unknown field; known are {', '.join(_KEYS)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _fail(f"{name}.role", f"must be one of {', '.join(ROLES)}")
    checked = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _content(message, f"{name}.content")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in checked:
            check_text(checked[key], f"{name}.{key}")
    if "tool_calls" in checked:
        calls = checked["tool_calls"]
        if role != "assistant" or not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise _fail(f"{name}.tool_calls", "must be a list of objects, in a message of the assistant")
    return checked


def _content(message: Mapping[str, Any], name: str) -> str:
    content = message.get("content")
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return check_text(content, name)
    if not isinstance(content, list):
        raise _fail(name, "must be a text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        where = f"{name}[{i}]"
        if not isinstance(part, Mapping):
            raise _fail(where, 'must be an object such as {"type": "text", "text": "..."}')
        if part.get("type") not in _TEXT_PARTS:
            raise _fail(f"{where}.type", f"must be one of {', '.join(_TEXT_PARTS)}; this model reads text only")
        texts.append(check_text(part.get("text"), f"{where}.text"))
    return "".join(texts)


def check_text(text: Any, name: str) -> str:
    """The text, if it is one that UTF-8 can carry (no lone surrogates). Raises InvalidRequestError."""
    if not isinstance(text, str):
        raise _fail(name, "must be a text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _fail(name, "has a lone surrogate, which is no character") from None
    return text
