"""ResponseStream: the engine's events of one request -> the wire events of one response. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.core.errors import SpecserveError
from specserve.core.messages import (
    DeltaEvent,
    Event,
    FailedEvent,
    FinishedEvent,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
    Usage,
)
from specserve.server import events
from specserve.server.request import CreateRequest
from specserve.server.sampling import renamed

WireEvent = dict[str, Any]


class ResponseStream:
    """The state machine of one response. After its one terminal event it yields nothing more.

    `open()` first, then `feed(event)` for each engine event; `heartbeat()` in silence, `fail(error)` and `cancel()`
    when the end does not come from the engine.
    """

    def __init__(
        self, response_id: str, request: CreateRequest, *, model: str, created_at: float, stream_id: str | None
    ) -> None:
        self.response_id = response_id
        self.stream_id = stream_id
        self.status = "queued"
        self.done = False
        self.prompt_tokens = 0
        self.object: dict[str, Any] = {}  # the final response object
        self.failure: FailedEvent | None = None
        self._request = request
        self._model = model
        self._created_at = created_at
        self._sequence = 0
        self._item_id = events.new_id("msg")
        self._item_open = False
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._prefill: dict[str, int] | None = None
        self._seed = request.params.seed

    def open(self) -> list[WireEvent]:
        """The first events."""
        return [
            self._event("response.created", response=self._response(full=True)),
            self._event("response.queued", response=self._response()),
        ]

    def feed(self, event: Event) -> list[WireEvent]:
        """Wire events of one engine event."""
        if self.done or isinstance(event, QueuedEvent):
            return []
        if isinstance(event, StartedEvent):
            self.status, self._seed = "in_progress", event.seed
            self._prefill = {"computed": event.cached_tokens, "total": event.prompt_tokens}
            return [self._in_progress()]
        if isinstance(event, ProgressEvent):
            self.status = "in_progress"
            self._prefill = {"computed": event.computed, "total": event.total}
            return [self._in_progress()]
        if isinstance(event, DeltaEvent):
            return self._delta(event)
        if isinstance(event, FinishedEvent):
            self._seed = event.seed
            return self._end(event.finish_reason, event.usage, event.numerics)
        self.failure = event
        error = events.error_object(event.code, event.message, renamed(event.param, self._request.names), event.status)
        return self._end("failed", event.usage, None, error)

    def fail(self, error: SpecserveError) -> list[WireEvent]:
        """End as failed for a reason outside the engine."""
        return self.feed(
            FailedEvent(self.response_id, error.code, error.message, error.param, error.status, self._known_usage())
        )

    def cancel(self) -> list[WireEvent]:
        """End as cancelled before the engine knew of it."""
        return [] if self.done else self._end("cancelled", self._known_usage(), None)

    def heartbeat(self) -> list[WireEvent]:
        """Something to say in silence: where the request stands."""
        if self.done:
            return []
        if self.status == "queued":
            return [self._event("response.queued", response=self._response())]
        return [self._in_progress()]

    def _known_usage(self) -> Usage:
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=len(self._token_ids))

    def _in_progress(self) -> WireEvent:
        return self._event("response.in_progress", response=self._response(), prefill=self._prefill)

    def _delta(self, event: DeltaEvent) -> list[WireEvent]:
        self.status = "in_progress"
        out = []
        if self._request.report_speculation:
            out = [self._event("response.speculation.delta", **events.speculation_step(s)) for s in event.speculation]
        if not (event.text or event.token_ids or event.logprobs):
            return out
        out += self._open_item()
        logprobs = events.logprob_objects(event.logprobs)
        self._text.append(event.text)
        self._token_ids.extend(event.token_ids)
        self._logprobs.extend(logprobs)
        content = {"delta": event.text, "logprobs": logprobs, "token_ids": list(event.token_ids)}
        out.append(self._event("response.output_text.delta", **self._place(), **content))
        return out

    def _open_item(self) -> list[WireEvent]:
        if self._item_open:
            return []
        self._item_open = True
        item = self._item("in_progress")
        item["content"] = []
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=empty),
        ]

    def _end(
        self, reason: str, usage: Usage, numerics: str | None, error: Mapping[str, Any] | None = None
    ) -> list[WireEvent]:
        status = {"stop": "completed", "length": "incomplete"}.get(reason, reason)
        out = self._open_item() if status in ("completed", "incomplete") else []
        self.status, self.done = status, True
        if self._item_open:
            out += self._close_item("completed" if status == "completed" else "incomplete")
        self.object = self._response(full=True)
        self.object["usage"] = events.usage_object(usage)
        self.object["numerics"] = numerics
        self.object["error"] = error
        if status == "incomplete":
            self.object["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._item_open:
            self.object["output"] = [self._item("completed" if status == "completed" else "incomplete")]
        return [*out, self._event(f"response.{status}", response=self.object)]

    def _close_item(self, status: str) -> list[WireEvent]:
        item = self._item(status)
        part = item["content"][0]
        return [
            self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str) -> dict[str, Any]:
        part = {
            "type": "output_text",
            "text": "".join(self._text),
            "annotations": [],
            "logprobs": self._logprobs,
            "token_ids": self._token_ids,
        }
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}

    def _response(self, full: bool = False) -> dict[str, Any]:
        """The response object; `full` (first and last event) with the request's options. The prompt is not echoed."""
        value: dict[str, Any] = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "status": self.status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
            "seed": self._seed,
        }
        if full:
            params = self._request.params
            value.update(
                temperature=params.temperature,
                top_p=params.top_p,
                max_output_tokens=params.max_tokens,
                top_logprobs=params.logprobs,
                previous_response_id=None,
                store=False,
                **self._request.echo,
            )
        return value

    def _event(self, type_: str, **content: Any) -> WireEvent:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return {
            "type": type_,
            "event_id": events.new_id("event"),
            "response_id": self.response_id,
            "stream_id": self.stream_id,
            "sequence_number": sequence,
            **content,
        }
