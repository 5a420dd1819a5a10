"""ResponseStream: the engine's events of one request -> the wire events of one response. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.core.errors import SpecserveError
from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    Event,
    FailedEvent,
    FinishedEvent,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
    Usage,
)
from specserve.core.sampling import SamplingParams
from specserve.server import events
from specserve.server.items import Content, OutputItem
from specserve.server.request import CreateRequest
from specserve.server.sampling import failure_object

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
        self._several = request.params.num_sequences > 1
        self._items: list[OutputItem] = []  # by choice
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
        if isinstance(event, ChoiceFinishedEvent):
            return self._choice_finished(event)
        if isinstance(event, FinishedEvent):
            self._seed = event.seed
            return self._end(event.finish_reason, event.usage, event.numerics)
        self.failure = event
        error = failure_object(event, self._request.names)
        usage = event.usage if event.usage.prompt_tokens else self._known_usage()  # a dead engine counts nothing
        return self._end("failed", usage, None, error)

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
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=sum(len(i.token_ids) for i in self._items))

    def _in_progress(self) -> WireEvent:
        return self._event("response.in_progress", response=self._response(), prefill=self._prefill)

    def _delta(self, event: DeltaEvent) -> list[WireEvent]:
        self.status = "in_progress"
        out = []
        if self._request.report_speculation:
            for step in event.speculation:
                content = {"output_index": event.index, **events.speculation_step(step)}
                out.append(self._event("response.speculation.delta", **content))
        if not (event.text or event.token_ids or event.logprobs):
            return out
        return [*out, *self._begin(event.index), *self._tell([self._items[event.index].delta(event)])]

    def _begin(self, index: int) -> list[WireEvent]:
        """Add the items of the choices up to `index`: in order, so that each stands in `output` at its output_index."""
        new = [OutputItem(i) for i in range(len(self._items), index + 1)]
        self._items += new
        return self._tell([content for item in new for content in item.added()])

    def _choice_finished(self, event: ChoiceFinishedEvent) -> list[WireEvent]:
        status = "completed" if event.finish_reason == "stop" else "incomplete"
        begun = self._begin(event.index)
        return [*begun, *self._tell(self._items[event.index].close(status, _ending(event)))]

    def _end(
        self, reason: str, usage: Usage, numerics: str | None, error: Mapping[str, Any] | None = None
    ) -> list[WireEvent]:
        status = {"stop": "completed", "length": "incomplete"}.get(reason, reason)
        ended = status in ("completed", "incomplete")
        out = self._begin(0) if ended and not self._several else []
        self.status, self.done = status, True
        for item in self._items:
            # Those of several choices that are open still have no end of their own.
            if self._several:
                out += self._tell(item.close("incomplete", _ending(None)))
            else:
                out += self._tell(item.close("completed" if status == "completed" else "incomplete"))
        self.object = self._response(full=True)
        self.object["usage"] = events.usage_object(usage)
        self.object["numerics"] = numerics
        self.object["error"] = error
        if status == "incomplete":
            self.object["incomplete_details"] = {"reason": "max_output_tokens"}
        self.object["output"] = [item.object() for item in self._items]
        return [*out, self._event(f"response.{status}", response=self.object)]

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
                **_sequences(params),
                **self._request.echo,
            )
        return value

    def _tell(self, contents: Sequence[Content]) -> list[WireEvent]:
        return [self._event(type_, **content) for type_, content in contents]

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


def _ending(event: ChoiceFinishedEvent | None) -> dict[str, Any]:
    """How one of several choices ended, and what gives it again; nulls for one that did not."""
    if event is None:
        return {"finish_reason": None, "seed": None, "score": None}
    return {"finish_reason": event.finish_reason, "seed": event.seed, "score": event.score}


def _sequences(params: SamplingParams) -> dict[str, Any]:
    """The options of a request of several sequences, as the response repeats them."""
    if params.num_sequences == 1:
        return {}
    names = ["beam_width", "length_penalty", "early_stopping"] if params.beams else ["best_of"]
    return {name: getattr(params, name) for name in ("n", *names)}
