"""The forms in which the Python API takes prompts, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from specserve.core.errors import InvalidRequestError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
Prompts = Prompt | Sequence[Prompt]


class PromptEncoder(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with what the model wants around a prompt."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation and the beginning of the answer."""


def encode_prompts(prompts: Prompts, encoder: PromptEncoder) -> list[tuple[int, ...]]:
    """Token ids of one prompt or of many.

    A text, a list of token ids and a list of messages are one prompt; a list of any of these is many.

    Raises:
        InvalidRequestError: names prompts[i]; or what the encoder finds wrong.
    """
    if _is_one(prompts):
        return [_encode(prompts, encoder, "prompts")]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise InvalidRequestError(
            "prompts: must be a text, token ids or chat messages, or a list of these that is not empty", param="prompts"
        )
    return [_encode(prompt, encoder, f"prompts[{i}]") for i, prompt in enumerate(prompts)]


def _is_one(prompts: object) -> bool:
    """By its first item: an id or a message makes it one prompt."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, (list, tuple)) and bool(prompts) and isinstance(prompts[0], (int, Mapping))


def _encode(prompt: Any, encoder: PromptEncoder, name: str) -> tuple[int, ...]:
    try:
        if isinstance(prompt, str):
            ids = encoder.encode(prompt)
        elif isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            ids = encoder.encode_chat(_messages(prompt, name))
        else:
            ids = _ids(prompt, name)
    except InvalidRequestError as error:
        if error.message.startswith(name):
            raise
        raise InvalidRequestError(f"{name}: {error.message}", param=name, code=error.code) from None
    if not ids:
        raise InvalidRequestError(f"{name}: is empty", param=name)
    return tuple(ids)


def _messages(prompt: Sequence[Any], name: str) -> Sequence[Mapping[str, Any]]:
    for i, message in enumerate(prompt):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequestError(f"{name}[{i}]: must be a message with role and content", param=f"{name}[{i}]")
    return prompt


def _ids(prompt: object, name: str) -> list[int]:
    if not isinstance(prompt, (list, tuple)):
        raise InvalidRequestError(f"{name}: must be a text, token ids or chat messages", param=name)
    for i, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidRequestError(f"{name}[{i}]: must be a token id", param=f"{name}[{i}]")
    return list(prompt)
