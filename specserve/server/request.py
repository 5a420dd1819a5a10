"""One validated request of any API, ready for tokenising."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specserve.core.errors import InvalidRequestError
from specserve.core.messages import GenerateCommand
from specserve.core.sampling import SamplingParams
from specserve.server.prompt import Prompt, check_length


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a client asked for.

    Attributes:
        names: SamplingParams' names -> the client's, for errors that come later from the engine.
        limit_name: the client's name of max_tokens.
        stream: whether the client wants events (HTTP; always on a WebSocket).
        echo: parts of the request that the response object repeats.
    """

    prompt: Prompt
    params: SamplingParams
    names: Mapping[str, str]
    limit_name: str
    stream_id: str | None = None
    stream: bool = False
    report_speculation: bool = False
    priority: int = 0
    include_usage: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)

    def command(self, request_id: str, token_ids: tuple[int, ...], namespace: str, model_len: int) -> GenerateCommand:
        """Raises ContextLengthError when the tokens do not fit."""
        check_length(self.prompt, len(token_ids), self.params.max_tokens, self.limit_name, model_len)
        return GenerateCommand(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=self.params,
            namespace=namespace,
            priority=self.priority,
            report_speculation=self.report_speculation,
        )


def check_model(values: Mapping[str, Any], model: str) -> None:
    """Raises InvalidRequestError, code "model_not_found" (404), for another model's name."""
    name = values.get("model")
    if name is None or name == model:
        return
    if not isinstance(name, str):
        raise InvalidRequestError("model: must be a text", param="model")
    error = InvalidRequestError(f"model: this server serves {model} only", param="model", code="model_not_found")
    error.status = 404
    raise error
