"""Chat completions and completions: their options, and their views of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    Event,
    FailedEvent,
    FinishedEvent,
    PositionLogprobs,
    Usage,
)
from specserve.server.choices import Choice, Choices
from specserve.server.codec import dumps
from specserve.server.events import logprob_objects, speculation_usage
from specserve.server.fields import flag, mapping, metadata, only, refuse, text, whole, wrong
from specserve.server.limits import MAX_METADATA, Limits
from specserve.server.prompt import Prompt, chat_prompt, token_ids
from specserve.server.request import CreateRequest, check_model
from specserve.server.sampling import DIRECT, failure_object, guided, sampling_params

IGNORED = ("user", "safety_identifier", "prompt_cache_key", "store", "parallel_tool_calls")
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "web_search_options": (),
}
SHARED = (*DIRECT, *IGNORED, *UNSUPPORTED, "model", "max_tokens", "stream", "stream_options", "logprobs", "priority")
CHAT = frozenset(
    (*SHARED, "messages", "max_completion_tokens", "top_logprobs", "response_format", "structured_outputs", "metadata")
)
COMPLETION = frozenset((*SHARED, "prompt", "response_format", "structured_outputs"))


def parse_chat(values: Mapping[str, Any], limits: Limits, model: str) -> CreateRequest:
    """Options of POST /v1/chat/completions. Raises InvalidRequestError naming the first option at fault."""
    only(values, CHAT)
    limit = "max_completion_tokens" if values.get("max_completion_tokens") is not None else "max_tokens"
    if limit == "max_completion_tokens" and values.get("max_tokens") not in (None, values[limit]):
        raise wrong("max_tokens", "differs from max_completion_tokens; give one of them")
    metadata(values, MAX_METADATA)
    asked, top = flag(values, "logprobs"), values.get("top_logprobs")
    if top is not None and top != 0 and not asked:
        raise wrong("top_logprobs", "needs logprobs true")
    logprobs = (top or 0) if asked else None
    return _request(values, limits, model, limit, logprobs, chat_prompt(values), "top_logprobs")


def parse_completion(values: Mapping[str, Any], limits: Limits, model: str) -> CreateRequest:
    """Options of POST /v1/completions: one prompt, as a text or as token ids."""
    only(values, COMPLETION)
    source = values.get("prompt")
    if isinstance(source, list) and len(source) == 1 and isinstance(source[0], (str, list)):
        source = source[0]
    if isinstance(source, str) and source:
        prompt = Prompt("prompt", text=source)
    elif isinstance(source, list):
        prompt = Prompt("prompt", token_ids=token_ids("prompt", {"prompt": source}, limits.vocab_size))
    else:
        raise wrong("prompt", "must be one non-empty text or one list of token ids")
    values = {"max_tokens": 16, **{name: value for name, value in values.items() if value is not None}}
    return _request(values, limits, model, "max_tokens", values.get("logprobs"), prompt, "logprobs")


def _request(
    values: Mapping[str, Any], limits: Limits, model: str, limit: str, logprobs: Any, prompt: Prompt, top: str
) -> CreateRequest:
    check_model(values, model)
    refuse(values, UNSUPPORTED)
    for name in ("store", "parallel_tool_calls"):
        flag(values, name)
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        text(values, name)
    guide = guided(values, "response_format", "json_schema", mapping(values, "response_format"))
    names = {"prompt": prompt.field, "max_tokens": limit, "logprobs": top, **guide.names}
    own: dict[str, Any] = {"max_tokens": values.get(limit), "logprobs": logprobs}
    if guide.value is not None:
        own["guided"] = guide.value
    streaming = mapping(values, "stream_options") or {}
    only(streaming, ("include_usage", "include_obfuscation"), "stream_options.")
    return CreateRequest(
        prompt=prompt,
        params=sampling_params(values, own, names, limits.vocab_size),
        names=names,
        limit_name=limit,
        stream=flag(values, "stream"),
        include_usage=flag(streaming, "include_usage"),
        priority=whole(values, "priority", -1000, 1000) or 0,
    )


class ChatView:
    """chat.completion, and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, name: str, request: CreateRequest, model: str, created: int) -> None:
        self._head = {"id": name, "created": created, "model": model}
        self._request = request
        self._several = request.params.num_sequences > 1
        self._choices = Choices()
        self._end: FinishedEvent | None = None

    def open(self) -> list[bytes]:
        return self._begin(0)

    def feed(self, event: Event) -> list[bytes]:
        if isinstance(event, DeltaEvent):
            return self._delta(event)
        if isinstance(event, ChoiceFinishedEvent):
            return [*self._begin(event.index), *self._finish(event.index, event)]
        if isinstance(event, FinishedEvent):
            self._end = event
            last = [] if self._several else [*self._begin(0), *self._finish(0, event)]
            return [*last, *self._usage_chunk()]
        if isinstance(event, FailedEvent):
            return [_data({"error": failure_object(event, self._request.names)})]
        return []

    def heartbeat(self) -> list[bytes]:
        return [b": heartbeat\n\n"]

    def close(self) -> list[bytes]:
        return [b"data: [DONE]\n\n"]

    def result(self) -> dict[str, Any]:
        choices = [{"index": c.index, **self._whole(c), **c.last} for c in self._choices.all()]
        return {"object": self.kind, **self._head, "choices": choices, **self._tail()}

    def _delta(self, event: DeltaEvent) -> list[bytes]:
        out = self._begin(event.index)
        self._choices[event.index].add(event)
        if event.text or event.logprobs:
            out.append(self._chunk(event.index, self._piece(event)))
        return out

    def _begin(self, index: int) -> list[bytes]:
        return [chunk for choice in self._choices.begin(index) for chunk in self._first(choice)]

    def _finish(self, index: int, event: ChoiceFinishedEvent | FinishedEvent) -> list[bytes]:
        choice = self._choices[index]
        return [self._chunk(index, {**self._last(), **choice.last})] if choice.finish(event) else []

    def _tail(self) -> dict[str, Any]:
        if self._end is None:
            return {}
        return {"usage": chat_usage(self._end.usage), "seed": self._end.seed, "numerics": self._end.numerics}

    def _usage_chunk(self) -> list[bytes]:
        if not self._request.include_usage:
            return []
        return [_data({"object": self.chunk_kind, **self._head, "choices": [], **self._tail()})]

    def _chunk(self, index: int, choice: dict[str, Any]) -> bytes:
        choices = [{"index": index, "finish_reason": None, **choice}]
        value = {"object": self.chunk_kind, **self._head, "choices": choices}
        return _data({**value, "usage": None} if self._request.include_usage else value)

    def _first(self, choice: Choice) -> list[bytes]:
        return [self._chunk(choice.index, {"delta": {"role": "assistant", "content": ""}})]

    def _piece(self, event: DeltaEvent) -> dict[str, Any]:
        logprobs = {"content": logprob_objects(event.logprobs)} if event.logprobs else None
        return {"delta": {"content": event.text}, "logprobs": logprobs}

    def _last(self) -> dict[str, Any]:
        return {"delta": {}}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        asked = self._request.params.logprobs is not None
        return {"message": message, "logprobs": {"content": logprob_objects(choice.logprobs)} if asked else None}


class CompletionView(ChatView):
    """text_completion; its chunks have the same form."""

    kind = chunk_kind = "text_completion"

    def _first(self, choice: Choice) -> list[bytes]:
        return []

    def _piece(self, event: DeltaEvent) -> dict[str, Any]:
        return {"text": event.text, "logprobs": self._columns(event.logprobs)}

    def _last(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {"text": "".join(choice.text), "logprobs": self._columns(choice.logprobs)}

    def _columns(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        if self._request.params.logprobs is None:
            return None
        return {
            "tokens": [p.token.text for p in positions],
            "token_logprobs": [p.token.logprob for p in positions],
            "top_logprobs": [{t.text: t.logprob for t in p.top} for p in positions],
            "text_offset": None,
        }


def chat_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "reasoning_tokens": 0,
        },
        "speculation": speculation_usage(usage),
    }


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"
