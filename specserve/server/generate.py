"""One request over HTTP: the engine's events to a View, as server-sent events or as one JSON body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from specserve.core.errors import SpecserveError
from specserve.core.messages import Event, FailedEvent, FinishedEvent, GenerateCommand, QueuedEvent
from specserve.server.codec import dumps
from specserve.server.request import CreateRequest
from specserve.server.sampling import failure_object
from specserve.server.state import ServerState, internal


class View(Protocol):
    """How one API shows a request: frames of a stream, or a whole result."""

    def open(self) -> list[bytes]: ...

    def feed(self, event: Event) -> list[bytes]: ...

    def heartbeat(self) -> list[bytes]: ...

    def close(self) -> list[bytes]: ...

    def result(self) -> dict[str, Any]: ...


class GenerationResponse:
    """An ASGI response. A client that goes away, or reads too slowly, ends its request in the engine."""

    def __init__(self, state: ServerState, request: CreateRequest, command: GenerateCommand, view: View) -> None:
        self._state = state
        self._request = request
        self._command = command
        self._view = view
        self._stop = asyncio.Event()
        self.active = 1

    def stop_admitting(self) -> None:
        """It is admitted already."""

    async def shut_down(self) -> None:
        """End with a typed failure."""
        self._stop.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.connections.add(self)
        gone = asyncio.create_task(_gone(receive))
        work = asyncio.create_task(self._stream(send) if self._request.stream else self._whole(send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._state.connections.discard(self)
            gone.cancel()
            work.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], (TimeoutError, OSError)):
            internal("response", results[0])

    async def _whole(self, send: Send) -> None:
        failure: FailedEvent | None = None
        async for event in self._events():
            if isinstance(event, FailedEvent):
                failure = event
            elif event is not None:
                self._view.feed(event)
        if failure is None:
            await _json(send, 200, self._view.result())
        else:
            await self._fail(send, failure)

    async def _stream(self, send: Send) -> None:
        """The status waits for the engine's first word, so that a request which it refuses gets an HTTP error."""
        open_, frames = False, self._view.open()
        async for event in self._events():
            if not open_ and isinstance(event, FailedEvent):
                await self._fail(send, event)
                return
            frames += self._view.heartbeat() if event is None else self._view.feed(event)
            if not open_:
                if isinstance(event, QueuedEvent):
                    continue
                open_ = True
                await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            await self._body(send, b"".join(frames), True)
            frames = []
        await self._body(send, b"".join(self._view.close()), False)

    async def _body(self, send: Send, data: bytes, more: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        # Not wait_for: before Python 3.12 it loses a cancellation that comes as the message goes out.
        async with asyncio.timeout(self._state.limits.slow_client_seconds):
            await send(message)

    async def _fail(self, send: Send, event: FailedEvent) -> None:
        await _json(send, event.status, {"error": failure_object(event, self._request.names)})

    async def _events(self) -> AsyncIterator[Event | None]:
        """The engine's events; None after each heartbeat interval of silence. The last one is terminal."""
        name, ended = self._command.request_id, False
        source = self._state.client.submit(self._command)
        stop = asyncio.ensure_future(self._stop.wait())
        step = asyncio.ensure_future(anext(source))
        try:
            while not ended:
                waits: set[asyncio.Future[Any]] = {step, stop}
                await asyncio.wait(
                    waits, timeout=self._state.limits.heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if stop.done() and not step.done():
                    yield FailedEvent(name, "shutting_down", "the server is shutting down", status=503)
                    return
                if not step.done():
                    yield None
                    continue
                event = self._result(step)
                ended = isinstance(event, (FinishedEvent, FailedEvent))
                yield event
                if not ended:
                    step = asyncio.ensure_future(anext(source))
        finally:
            stop.cancel()
            await asyncio.shield(asyncio.ensure_future(self._finish(source, step, ended)))

    def _result(self, step: asyncio.Future[Event]) -> Event:
        name = self._command.request_id
        try:
            return step.result()
        except StopAsyncIteration:
            return FailedEvent(name, "server_error", "the engine ended the request without a result")
        except SpecserveError as error:
            return FailedEvent(name, error.code, error.message, error.param, error.status)
        except Exception as bug:
            hidden = internal("response", bug)
            return FailedEvent(name, hidden.code, hidden.message)

    async def _finish(self, source: Any, step: asyncio.Future[Event], ended: bool) -> None:
        if not ended:
            await self._state.abort(self._command.request_id)
        step.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await step
        await source.aclose()


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json(send: Send, status: int, value: dict[str, Any]) -> None:
    body = dumps(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
