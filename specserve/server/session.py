"""Session: the protocol of one WebSocket, sans-IO. Frames and engine events in; frames and engine commands out.

The I/O layer carries out each output, in order, and reports back: `prepared` or `refused` after Prepare,
`engine_event` and `failed` after a GenerateCommand. Nothing here waits, so it can be tested without sockets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specserve.core.errors import InvalidRequestError, OverloadedError, SpecserveError
from specserve.core.messages import AbortCommand, Event, GenerateCommand
from specserve.server import events
from specserve.server.codec import loads
from specserve.server.fields import mapping, only, text, wrong
from specserve.server.limits import Limits
from specserve.server.options import parse_responses
from specserve.server.request import CreateRequest
from specserve.server.response import ResponseStream, WireEvent

ENVELOPE = ("type", "event_id")
SHUTDOWN = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Send:
    """Send an event to the client."""

    event: WireEvent


@dataclass(frozen=True, slots=True)
class Prepare:
    """Tokenise the prompt, then call `prepared` or `refused`."""

    response_id: str
    request: CreateRequest


Output = Send | Prepare | GenerateCommand | AbortCommand


@dataclass(slots=True)
class _Live:
    """One response that has not ended."""

    stream: ResponseStream
    request: CreateRequest
    last_sent: float
    opened: bool = False  # response.created was sent
    command: GenerateCommand | None = None
    submitted: bool = False
    lane: str | None = field(default=None)


class Session:
    """The state of one connection: its live responses and its lanes (stream_id -> responses in order).

    Responses of one `stream_id` run one after the other, different ones at once. A create without a stream_id has
    a lane of its own, named by its response id.
    """

    def __init__(
        self, limits: Limits, model: str, namespace: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._model = model
        self._namespace = namespace
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._lanes: dict[str, deque[str]] = {}
        self._stopping = False
        self._session_id = events.new_id("sess")

    @property
    def active(self) -> int:
        """Responses that have not ended."""
        return len(self._live)

    def connected(self) -> list[Output]:
        """The first event: the limits."""
        session = {"id": self._session_id, "model": self._model, "limits": self._limits.public()}
        return [Send({**_envelope("session.created"), "session": session})]

    def receive_text(self, data: str) -> list[Output]:
        """One text frame. A frame at fault gives exactly one error event and changes nothing."""
        values: dict[str, Any] = {}
        try:
            values = loads(data)
            return self._dispatch(values)
        except SpecserveError as error:
            return [self._error(error, values)]

    def receive_binary(self) -> list[Output]:
        return [self._error(InvalidRequestError("binary frames are not supported; send JSON text"), {})]

    def prepared(self, response_id: str, token_ids: tuple[int, ...]) -> list[Output]:
        """The prompt is tokenised: open the response, and submit it when its lane is free."""
        live = self._live.get(response_id)
        if live is None:
            return []
        try:
            live.command = live.request.command(response_id, token_ids, self._namespace, self._limits.model_len)
        except SpecserveError as error:
            return self.refused(response_id, error)
        live.opened = True
        live.stream.prompt_tokens = len(token_ids)
        return [*self._send(live, live.stream.open()), *self._submit(live)]

    def refused(self, response_id: str, error: SpecserveError) -> list[Output]:
        """The prompt cannot be served: one error event, and no response."""
        live = self._live.get(response_id)
        if live is None:
            return []
        if live.opened:
            return self.failed(response_id, error)
        return [self._error(error, {"stream_id": live.stream.stream_id}), *self._forget(live)]

    def engine_event(self, response_id: str, event: Event) -> list[Output]:
        live = self._live.get(response_id)
        if live is None:
            return []
        return self._after(live, live.stream.feed(event))

    def failed(self, response_id: str, error: SpecserveError) -> list[Output]:
        """The response ends for a reason outside of the engine's events."""
        live = self._live.get(response_id)
        if live is None:
            return []
        return self._after(live, [*self._opening(live), *live.stream.fail(error)])

    def cancelled(self, response_id: str) -> list[Output]:
        """The response was aborted before the engine got it."""
        live = self._live.get(response_id)
        return [] if live is None else self._after(live, [*self._opening(live), *live.stream.cancel()])

    def tick(self) -> list[Output]:
        """Heartbeats of the responses that have been silent for too long."""
        now = self._clock()
        out: list[Output] = []
        for live in self._live.values():
            if live.opened and now - live.last_sent >= self._limits.heartbeat_seconds:
                out += self._send(live, live.stream.heartbeat())
        return out

    def stop_admitting(self) -> None:
        """From now on creates are refused."""
        self._stopping = True

    def shutdown(self) -> list[Output]:
        """End every live response with a typed failure."""
        self._stopping = True
        out: list[Output] = []
        # Newest first, so that no end submits the next response of a lane.
        for response_id in reversed(list(self._live)):
            live = self._live.get(response_id)
            if live is not None:
                aborts = [AbortCommand(response_id)] if live.submitted else []
                live.submitted = False
                out += [*aborts, *self.failed(response_id, OverloadedError(SHUTDOWN, code="shutting_down"))]
        return out

    def disconnected(self) -> list[Output]:
        """The client is gone: abort whatever still runs for it."""
        out: list[Output] = [AbortCommand(name) for name, live in self._live.items() if live.submitted]
        self._live.clear()
        self._lanes.clear()
        return out

    def _dispatch(self, values: dict[str, Any]) -> list[Output]:
        kind = values.get("type")
        if kind == "response.create":
            return self._create(values)
        if kind == "response.cancel":
            return self._cancel(values)
        if kind is None:
            raise wrong("type", "is missing")
        raise wrong("type", "unknown event type; known are response.create and response.cancel", "unknown_event_type")

    def _create(self, values: Mapping[str, Any]) -> list[Output]:
        options = _options(values)
        request = parse_responses(options, self._limits, self._model, socket=True)
        if self._stopping:
            raise OverloadedError(SHUTDOWN, code="shutting_down")
        if len(self._live) >= self._limits.responses:
            raise _too_many(self._limits.responses)
        response_id = events.new_id("resp")
        lane = request.stream_id or response_id
        stream = ResponseStream(
            response_id, request, model=self._model, created_at=float(int(time.time())), stream_id=lane
        )
        self._live[response_id] = _Live(stream, request, self._clock(), lane=lane)
        self._lanes.setdefault(lane, deque()).append(response_id)
        return [Prepare(response_id, request)]

    def _cancel(self, values: Mapping[str, Any]) -> list[Output]:
        only(values, (*ENVELOPE, "response_id", "stream_id"))
        response_id, stream_id = text(values, "response_id"), text(values, "stream_id")
        if response_id is None and stream_id is None:
            raise wrong("response_id", "is missing; name a response by response_id or stream_id")
        if response_id is None and stream_id in self._lanes:
            response_id = self._lanes[stream_id][0]
        live = self._live.get(response_id or "")
        if live is None or (stream_id is not None and live.lane != stream_id):
            param = "response_id" if values.get("response_id") is not None else "stream_id"
            error = wrong(param, "no such active response", code="response_not_found")
            error.status = 404
            raise error
        if live.submitted:
            return [AbortCommand(live.stream.response_id)]
        return self.cancelled(live.stream.response_id)

    def _opening(self, live: _Live) -> list[WireEvent]:
        """The first events, if they were not sent yet: a terminal event never stands alone."""
        if live.opened:
            return []
        live.opened = True
        return live.stream.open()

    def _submit(self, live: _Live) -> list[Output]:
        if live.submitted or live.command is None or self._lanes[live.lane or ""][0] != live.stream.response_id:
            return []
        live.submitted = True
        return [live.command]

    def _after(self, live: _Live, wire: list[WireEvent]) -> list[Output]:
        out = self._send(live, wire)
        return [*out, *self._forget(live)] if live.stream.done else out

    def _forget(self, live: _Live) -> list[Output]:
        """Drop a response that ended; the next one of its lane goes to the engine."""
        self._live.pop(live.stream.response_id, None)
        name = live.lane or ""
        lane = self._lanes[name]
        lane.remove(live.stream.response_id)
        if lane:
            return self._submit(self._live[lane[0]])
        del self._lanes[name]
        return []

    def _send(self, live: _Live, wire: list[WireEvent]) -> list[Output]:
        if wire:
            live.last_sent = self._clock()
        return [Send(event) for event in wire]

    def _error(self, error: SpecserveError, values: Mapping[str, Any]) -> Send:
        """One error event. `stream_id` and the client's `event_id` are told where they are known."""
        nested = values.get("response")
        inner = nested if isinstance(nested, dict) else {}
        detail = events.error_of(error)
        detail["event_id"] = _known_text(values.get("event_id"))
        stream_id = _known_text(values.get("stream_id")) or _known_text(inner.get("stream_id"))
        event = _envelope("error", stream_id)
        return Send({**event, "status": error.status, "error": detail})


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a create, flat in the event or nested under `response`."""
    nested = mapping(values, "response")
    if nested is None:
        return {name: value for name, value in values.items() if name not in (*ENVELOPE, "response")}
    only(values, (*ENVELOPE, "response", "stream_id"))
    if values.get("stream_id") is None:
        return dict(nested)
    return {**nested, "stream_id": values["stream_id"]}


def _too_many(most: int) -> OverloadedError:
    error = OverloadedError(
        f"{most} responses are active on this connection, its limit; wait for one to end", code="too_many_responses"
    )
    error.status = 429
    return error


def _known_text(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= 256 else None


def _envelope(type_: str, stream_id: str | None = None) -> WireEvent:
    return {
        "type": type_,
        "event_id": events.new_id("event"),
        "response_id": None,
        "stream_id": stream_id,
        "sequence_number": None,
    }
