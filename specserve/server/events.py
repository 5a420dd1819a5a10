"""Small builders of wire objects: errors, usage, log probabilities, speculation."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from specserve.core.errors import SpecserveError
from specserve.core.messages import Logprob, PositionLogprobs, SpeculationStep, Usage

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def error_object(code: str, message: str, param: str | None, status: int) -> dict[str, Any]:
    """The one form of an error, inside every event and HTTP body that tells of one."""
    return {"message": message, "type": ERROR_TYPES.get(status, "server_error"), "param": param, "code": code}


def error_of(error: SpecserveError) -> dict[str, Any]:
    return error_object(error.code, error.message, error.param, error.status)


def usage_object(usage: Usage) -> dict[str, Any]:
    """Usage as the Responses API has it, and `speculation` beside it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "speculation": speculation_usage(usage),
    }


def speculation_usage(usage: Usage) -> dict[str, Any]:
    return {
        "drafted": usage.drafted,
        "accepted": usage.accepted,
        "rejected": usage.rejected,
        "by_source": {
            name: {"drafted": drafted, "accepted": accepted, "rejected": drafted - accepted}
            for name, (drafted, accepted) in usage.by_source.items()
        },
    }


def logprob_objects(positions: Sequence[PositionLogprobs], with_ids: bool = True) -> list[dict[str, Any]]:
    """One entry a token; `logprob` is null for minus infinity."""
    return [
        {**_entry(position.token, with_ids), "top_logprobs": [_entry(top, with_ids) for top in position.top]}
        for position in positions
    ]


def _entry(entry: Logprob, with_id: bool) -> dict[str, Any]:
    value: dict[str, Any] = {
        "token": entry.text,
        "logprob": entry.logprob,
        "bytes": list(entry.text.encode("utf-8", "replace")),
    }
    if with_id:
        value["token_id"] = entry.token_id
    return value


def speculation_step(step: SpeculationStep) -> dict[str, Any]:
    """What one step drafted: each token with its source, and how many of them were accepted."""
    tokens = zip(step.token_ids, step.texts, step.sources, strict=True)
    return {
        "tokens": [{"token_id": token, "text": text, "source": source} for token, text, source in tokens],
        "drafted": len(step.token_ids),
        "accepted": step.num_accepted,
        "rejected": len(step.token_ids) - step.num_accepted,
    }
