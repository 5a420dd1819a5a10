"""The options of the Responses API, over WebSocket and HTTP -> CreateRequest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.server.fields import flag, mapping, metadata, only, refuse, text, whole, wrong
from specserve.server.limits import MAX_METADATA, MAX_STREAM_ID, Limits
from specserve.server.prompt import responses_prompt
from specserve.server.request import CreateRequest, check_model
from specserve.server.sampling import DIRECT, guided, sampling_params

# Known, harmless, and without effect: nothing is stored, and users are told apart by their keys.
IGNORED = ("store", "user", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "prompt_cache_retention")
# Known and not supported: the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": ({},),
    "background": (False,),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    "generate": (True,),
    "image": ({},),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "truncation": ("disabled",),
}
OWN = (
    "input",
    "instructions",
    "prompt_token_ids",
    "model",
    "max_output_tokens",
    "text",
    "stream",
    "metadata",
    "include",
    "logprobs",
    "top_logprobs",
    "structured_outputs",
    "report_speculation",
    "priority",
)
KNOWN = frozenset((*OWN, *DIRECT, *IGNORED, *UNSUPPORTED))
LOGPROBS = "message.output_text.logprobs"


def parse_responses(values: Mapping[str, Any], limits: Limits, model: str, *, socket: bool) -> CreateRequest:
    """Validate everything about a create but the length of its prompt.

    Raises:
        InvalidRequestError: naming the first option at fault.
    """
    only(values, (*KNOWN, "stream_id") if socket else KNOWN)
    check_model(values, model)
    _check_ignored(values)
    refuse(values, UNSUPPORTED)
    if socket and values.get("stream") not in (None, True):
        raise wrong("stream", "must be true on a WebSocket, or left out")
    format_ = _format(values)
    guide = guided(values, "text.format", "", format_)
    prompt = responses_prompt(values, limits.vocab_size)
    names = {"prompt": prompt.field, "max_tokens": "max_output_tokens", "logprobs": "top_logprobs", **guide.names}
    own: dict[str, Any] = {"max_tokens": values.get("max_output_tokens"), "logprobs": _logprobs(values)}
    if guide.value is not None:
        own["guided"] = guide.value
    params = sampling_params(values, own, names, limits.vocab_size)
    return CreateRequest(
        prompt=prompt,
        params=params,
        names=names,
        limit_name="max_output_tokens",
        stream_id=text(values, "stream_id", most=MAX_STREAM_ID),
        stream=flag(values, "stream", default=socket),
        report_speculation=flag(values, "report_speculation"),
        priority=whole(values, "priority", -1000, 1000) or 0,
        echo={"metadata": metadata(values, MAX_METADATA), "text": {"format": dict(format_ or {"type": "text"})}},
    )


def _check_ignored(values: Mapping[str, Any]) -> None:
    for name in ("store", "parallel_tool_calls"):
        flag(values, name)
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        text(values, name)
    if values.get("prompt_cache_retention") not in (None, "in_memory"):
        raise wrong("prompt_cache_retention", "must be in_memory", code="unsupported_parameter")


def _format(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = mapping(values, "text")
    if found is None:
        return None
    only(found, ("format", "verbosity"), "text.")
    if found.get("verbosity") not in (None, "medium"):
        raise wrong("text.verbosity", "not supported here; leave it out", code="unsupported_parameter")
    return mapping(found, "format", "text.")


def _logprobs(values: Mapping[str, Any]) -> Any:
    include = values.get("include")
    if not isinstance(include, (list, type(None))):
        raise wrong("include", "must be a list")
    for i, name in enumerate(include or ()):
        if name != LOGPROBS:
            raise wrong(f"include[{i}]", f"must be {LOGPROBS}", code="unsupported_parameter")
    asked = flag(values, "logprobs") or bool(include)
    top = values.get("top_logprobs")
    # The official client may send top_logprobs 0 for "none".
    if top is None or (top == 0 and not isinstance(top, bool) and not asked):
        return 0 if asked else None
    return top
