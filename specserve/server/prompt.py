"""Prompts: the input of each API -> chat messages, and messages -> token ids (in a thread, never in the event loop)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from specserve.core.errors import ContextLengthError, InvalidRequestError, SpecserveError
from specserve.server.fields import only, wrong
from specserve.server.sampling import check_ids

ROLES = ("system", "developer", "user", "assistant")


class ChatTokenizer(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of `messages`, `text` and `token_ids`; `field` is where the client gave it."""

    field: str
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def responses_prompt(values: Mapping[str, Any], vocab_size: int) -> Prompt:
    """From `input` (text or items) and `instructions`, or `prompt_token_ids`."""
    source, instructions = values.get("input"), values.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise wrong("instructions", "must be a text")
    if values.get("prompt_token_ids") is not None:
        for name in ("input", "instructions"):
            if values.get(name) is not None:
                raise wrong(name, f"give {name} or prompt_token_ids, not both")
        return Prompt("prompt_token_ids", token_ids=token_ids("prompt_token_ids", values, vocab_size))
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(source, str):
        if not source:
            raise wrong("input", "must not be empty")
        messages.append({"role": "user", "content": source})
    elif isinstance(source, list) and source:
        messages += [_item(item, f"input[{i}]") for i, item in enumerate(source)]
    else:
        raise wrong("input", "is missing" if source is None else "must be a text or a list of at least one message")
    return Prompt("input", messages=tuple(messages))


def chat_prompt(values: Mapping[str, Any]) -> Prompt:
    """From `messages`."""
    source = values.get("messages")
    if not isinstance(source, list) or not source:
        raise wrong("messages", "must be a list of at least one message")
    messages = []
    for i, item in enumerate(source):
        at = f"messages[{i}]"
        if not isinstance(item, dict):
            raise wrong(at, "must be an object with role and content")
        for name in ("tool_calls", "function_call", "refusal", "audio", "annotations", "name"):
            if item.get(name):
                raise wrong(f"{at}.{name}", "not supported here; leave it out", code="unsupported_parameter")
        only(
            item,
            ("role", "content", "tool_calls", "function_call", "refusal", "audio", "annotations", "name"),
            at + ".",
        )
        messages.append(_message(item, at, ("text",)))
    return Prompt("messages", messages=tuple(messages))


def token_ids(name: str, values: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    ids = values.get(name)
    if not isinstance(ids, list) or not ids:
        raise wrong(name, "must be a list of at least one token id")
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise wrong(f"{name}[{i}]", "must be a token id")
    check_ids(name, ids, vocab_size)
    return tuple(ids)


def _item(item: object, at: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise wrong(at, "must be an object with role and content")
    if item.get("type", "message") != "message":
        raise wrong(f"{at}.type", "must be message; other items are not supported here", code="unsupported_parameter")
    # id, status and phase come with output items that are sent back as input.
    only(item, ("type", "role", "content", "id", "status", "phase"), f"{at}.")
    return _message(item, at, ("input_text", "output_text", "text"))


def _message(item: Mapping[str, Any], at: str, kinds: Sequence[str]) -> dict[str, str]:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise wrong(f"{at}.role", f"must be one of {', '.join(ROLES)}")
    if isinstance(content, list) and content:
        content = "".join(_part(part, f"{at}.content[{i}]", kinds) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong(f"{at}.content", "must be a text or a list of text parts")
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(part: object, at: str, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        raise wrong(at, "must be an object with type and text")
    if part.get("type") not in kinds:
        raise wrong(f"{at}.type", f"must be one of {', '.join(kinds)}", code="unsupported_parameter")
    # annotations and logprobs come with output parts that are sent back as input.
    only(part, ("type", "text", "annotations", "logprobs"), f"{at}.")
    found = part.get("text")
    if not isinstance(found, str):
        raise wrong(f"{at}.text", "must be a text")
    return found


async def tokenize(prompt: Prompt, tokenizer: ChatTokenizer, executor: Executor) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
        InvalidRequestError: the model's chat template refuses the messages. Nothing of the prompt is in the error.
    """
    if prompt.token_ids is not None:
        return prompt.token_ids
    loop = asyncio.get_running_loop()
    try:
        if prompt.messages is not None:
            ids = await loop.run_in_executor(executor, tokenizer.encode_chat, list(prompt.messages))
        else:
            ids = await loop.run_in_executor(executor, tokenizer.encode, prompt.text or "")
    except SpecserveError as error:
        raise InvalidRequestError(error.message, param=prompt.field, code=error.code) from None
    except Exception as error:  # a template may raise anything; its words may quote the prompt
        raise InvalidRequestError(
            f"{prompt.field}: the model's chat template refuses these messages ({type(error).__name__})",
            param=prompt.field,
        ) from None
    return tuple(ids)


def check_length(prompt: Prompt, length: int, max_tokens: int | None, limit_name: str, model_len: int) -> None:
    """Fail when the prompt, or the prompt and the asked output, do not fit the context."""
    if length == 0:
        raise wrong(prompt.field, "has no tokens")
    if length >= model_len:
        raise ContextLengthError(
            f"{prompt.field}: has {length} tokens; the context of {model_len} must hold at least one more",
            param=prompt.field,
        )
    if max_tokens is not None and length + max_tokens > model_len:
        raise ContextLengthError(
            f"{limit_name}: is {max_tokens}; with {length} prompt tokens at most {model_len - length} fit the context",
            param=limit_name,
        )
