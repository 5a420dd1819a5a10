"""Client options -> SamplingParams. Every API names the same options its own way; errors use the client's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from specserve.core.errors import InvalidRequestError, SpecserveError
from specserve.core.messages import FailedEvent
from specserve.core.sampling import SamplingParams
from specserve.server.events import error_object
from specserve.server.fields import mapping, only, text, wrong

# Options whose names are the same in every API and in SamplingParams.
DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "banned_token_ids",
    "logprobs_mode",
    "speculation",
    "n",
    "best_of",
    "beam_width",
    "length_penalty",
    "early_stopping",
)
STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}


@dataclass(slots=True)
class Guided:
    """The guided option of a request, and where its parts stand in the client's own request."""

    value: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)


def guided(values: Mapping[str, Any], format_name: str, schema_at: str, format_: Mapping[str, Any] | None) -> Guided:
    """From the format object ({"type": ...}, its schema inside under `schema_at`) or `structured_outputs`."""
    found = _format(format_name, schema_at, format_) if format_ is not None else Guided()
    structured = mapping(values, "structured_outputs")
    if structured is None:
        return found
    if found.value is not None:
        raise wrong("structured_outputs", f"give {format_name} or structured_outputs, not both")
    return _structured(structured)


def _format(name: str, schema_at: str, format_: Mapping[str, Any]) -> Guided:
    kind = format_.get("type")
    if kind in ("text", "json_object"):
        only(format_, ("type",), f"{name}.")
        names = {"guided.json_object": f"{name}.type", "guided": name}
        return Guided({"json_object": True}, names) if kind == "json_object" else Guided()
    if kind != "json_schema":
        raise wrong(f"{name}.type", "must be text, json_object or json_schema")
    holder, at = format_, f"{name}."
    if schema_at:
        only(format_, ("type", schema_at), at)
        inner = mapping(format_, schema_at, at)
        at = f"{name}.{schema_at}."
        if inner is None:
            raise wrong(at[:-1], "is missing")
        holder = inner
    only(holder, ("type", "name", "description", "schema", "strict"), at)
    text(holder, "name", at)
    text(holder, "description", at)
    if not isinstance(holder.get("strict"), (bool, type(None))):
        raise wrong(at + "strict", "must be true or false")
    if not isinstance(holder.get("schema"), (dict, bool)):
        raise wrong(at + "schema", "must be a JSON Schema (an object)")
    return Guided({"json_schema": holder["schema"]}, {"guided.json_schema": at + "schema", "guided": at + "schema"})


def _structured(values: Mapping[str, Any]) -> Guided:
    at = "structured_outputs"
    only(values, (*STRUCTURED, "whitespace"), f"{at}.")
    kinds = [kind for kind in STRUCTURED if values.get(kind) is not None]
    if len(kinds) != 1:
        raise wrong(at, f"must have exactly one of {', '.join(STRUCTURED)}")
    value = values[kinds[0]]
    if kinds[0] == "json" and isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise wrong(f"{at}.json", "is a text that is not valid JSON") from None
    _check_kind(f"{at}.{kinds[0]}", kinds[0], value)
    result = {STRUCTURED[kinds[0]]: value}
    if values.get("whitespace") is not None:
        result["whitespace"] = values["whitespace"]
    names = {f"guided.{STRUCTURED[kind]}": f"{at}.{kind}" for kind in STRUCTURED}
    return Guided(result, {**names, "guided.whitespace": f"{at}.whitespace", "guided": f"{at}.{kinds[0]}"})


def _check_kind(name: str, kind: str, value: object) -> None:
    if kind == "json" and not isinstance(value, (dict, bool)):
        raise wrong(name, "must be a JSON Schema")
    if kind == "json_object" and value is not True:
        raise wrong(name, "must be true")
    if kind == "regex" and not isinstance(value, str):
        raise wrong(name, "must be a text")
    if kind == "grammar" and not (isinstance(value, str) or (isinstance(value, dict) and set(value) == {"name"})):
        raise wrong(name, 'must be a text or {"name": a shipped grammar}')
    if kind == "choice" and not (
        isinstance(value, list) and value and all(isinstance(choice, str) and choice for choice in value)
    ):
        raise wrong(name, "must be a list of at least one non-empty text")


def sampling_params(
    values: Mapping[str, Any], own: Mapping[str, Any], names: Mapping[str, str], vocab_size: int
) -> SamplingParams:
    """`own` are options under SamplingParams' names, `names` what the client calls them.

    Raises:
        InvalidRequestError: with the client's name of the option.
    """
    options = {name: values[name] for name in DIRECT if values.get(name) is not None}
    # The APIs' own default; beam search does not sample.
    options.setdefault("temperature", 0.0 if "beam_width" in options else 1.0)
    options.update(own)
    try:
        params = SamplingParams.from_dict(options)
        _check_vocabulary(params, vocab_size)
    except SpecserveError as error:
        raise rename(error, names) from None
    return params


def rename(error: SpecserveError, names: Mapping[str, str]) -> SpecserveError:
    """The same error with the option called as the client calls it."""
    param = renamed(error.param, names)
    if param == error.param or param is None:
        return error
    message = error.message
    if error.param and message.startswith(error.param):
        message = param + message[len(error.param) :]
    return InvalidRequestError(message, param=param, code=error.code)


def failure_object(event: FailedEvent, names: Mapping[str, str]) -> dict[str, Any]:
    """The error of a failed request, its option called as the client calls it, in the message too."""
    param, message = renamed(event.param, names), event.message
    if event.param and param and message.startswith(event.param):
        message = param + message[len(event.param) :]
    return error_object(event.code, message, param, event.status)


def renamed(param: str | None, names: Mapping[str, str]) -> str | None:
    """`names` maps prefixes; the longest one that ends at a word's end wins."""
    if param is None:
        return None
    param = param.removeprefix("params.")
    for prefix in sorted(names, key=len, reverse=True):
        rest = param[len(prefix) :]
        if param.startswith(prefix) and (not rest or not (rest[0].isalnum() or rest[0] == "_")):
            return names[prefix] + rest
    return param


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise wrong(name, f"token id {token} is outside the vocabulary (0 to {vocab_size - 1})")


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        check_ids(name, getattr(params, name) or (), vocab_size)
