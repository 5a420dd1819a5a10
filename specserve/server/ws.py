"""The I/O of one WebSocket: carries out what its Session says. One reader, one writer, one task a response."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from specserve.core.errors import SpecserveError
from specserve.core.messages import AbortCommand, GenerateCommand
from specserve.server.auth import Identity, authenticate
from specserve.server.codec import dumps
from specserve.server.events import error_of
from specserve.server.outbox import Outbox
from specserve.server.prompt import tokenize
from specserve.server.session import Output, Prepare, Send, Session
from specserve.server.state import ServerState, internal, log

GOING_AWAY, INTERNAL_ERROR, TRY_AGAIN_LATER = 1001, 1011, 1013
FLUSH_SECONDS = 5.0
CloseReason = tuple[int, str]


async def serve_socket(websocket: WebSocket, state: ServerState) -> None:
    """The route: refuse before the upgrade (401, 403, 503), or run the connection to its end."""
    try:
        identity = authenticate(state.config, websocket.headers, websocket.scope.get("subprotocols", ()))
        state.admit()
    except SpecserveError as error:
        await websocket.send_denial_response(JSONResponse({"error": error_of(error)}, status_code=error.status))
        return
    await SocketConnection(websocket, state, identity).run()


class SocketConnection:
    """One accepted connection."""

    def __init__(self, websocket: WebSocket, state: ServerState, identity: Identity) -> None:
        self._websocket = websocket
        self._state = state
        self._identity = identity
        self._session = Session(state.limits, state.model, identity.namespace)
        self._outbox = Outbox(state.limits.output_buffer_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumps: set[str] = set()  # requests that the engine's client knows
        self._early: set[str] = set()  # aborted before that
        self._stop: asyncio.Future[CloseReason] = asyncio.get_running_loop().create_future()

    @property
    def active(self) -> int:
        return self._session.active

    def stop_admitting(self) -> None:
        self._session.stop_admitting()

    async def run(self) -> None:
        """Until the client goes, is too slow, or the server stops."""
        await self._websocket.accept(subprotocol=self._identity.subprotocol)
        self._state.connections.add(self)
        loops: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(loop) for loop in (self._read(), self._write(), self._tick())
        ]
        try:
            self._perform(self._session.connected())
            await asyncio.wait([*loops, self._stop], return_when=asyncio.FIRST_COMPLETED)
            await self._close(self._outcome(loops))
        finally:
            self._state.connections.discard(self)
            self._perform(self._session.disconnected())
            for task in loops:
                task.cancel()
            aborts = [task for task in self._tasks if task.get_name() == "abort"]
            for task in self._tasks.difference(aborts):
                task.cancel()
            await asyncio.gather(*loops, *self._tasks, return_exceptions=True)

    async def shut_down(self) -> None:
        """End live responses with typed failures, send them, close with 1001."""
        self._perform(self._session.shutdown())
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._outbox.drained()
        self._end(GOING_AWAY, "the server is shutting down")

    def _end(self, code: int, reason: str) -> None:
        if not self._stop.done():
            self._stop.set_result((code, reason))

    def _outcome(self, loops: list[asyncio.Future[Any]]) -> CloseReason | None:
        """Why the connection ends: what to close it with, or None when the client is gone already."""
        for loop in loops:
            error = loop.exception() if loop.done() and not loop.cancelled() else None
            if error is not None and not isinstance(error, (WebSocketDisconnect, OSError)):
                internal("connection", error)
                return INTERNAL_ERROR, "internal error"
        return self._stop.result() if self._stop.done() else None

    async def _close(self, reason: CloseReason | None) -> None:
        if reason is None:
            return
        log.info("closing a connection: %d %s", *reason)
        with suppress(WebSocketDisconnect, RuntimeError, OSError):
            await self._websocket.close(*reason)

    async def _read(self) -> None:
        while True:
            # A client that floods without reading its answers waits here, by the flow control of TCP.
            await self._outbox.room()
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("text")
            if data is None:
                self._perform(self._session.receive_binary())
            else:
                self._perform(self._session.receive_text(data))

    async def _write(self) -> None:
        while True:
            frame = await self._outbox.first()
            await self._websocket.send_text(frame.decode())
            self._outbox.sent()

    async def _tick(self) -> None:
        limits = self._state.limits
        pause = max(min(limits.heartbeat_seconds, limits.slow_client_seconds, 4.0) / 4, 0.01)
        while True:
            await asyncio.sleep(pause)
            if self._outbox.stuck_for() > limits.slow_client_seconds:
                self._end(TRY_AGAIN_LATER, "the client reads too slowly")
                return
            if not self._outbox.stuck_for():
                self._perform(self._session.tick())

    def _perform(self, outputs: list[Output]) -> None:
        """Carry out what the session says, in order. Sends are buffered; the rest runs in tasks of its own."""
        for output in outputs:
            if isinstance(output, Send):
                self._outbox.put(dumps(output.event))
            elif isinstance(output, Prepare):
                self._spawn(self._prepare(output), "prepare")
            elif isinstance(output, GenerateCommand):
                self._spawn(self._pump(output), "pump")
            else:
                self._abort(output)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _abort(self, command: AbortCommand) -> None:
        if command.request_id in self._pumps:
            self._spawn(self._state.abort(command.request_id), "abort")
        else:
            self._early.add(command.request_id)

    async def _prepare(self, job: Prepare) -> None:
        try:
            ids = await tokenize(job.request.prompt, self._state.tokenizer, self._state.threads)
            self._perform(self._session.prepared(job.response_id, ids))
        except SpecserveError as error:
            self._perform(self._session.refused(job.response_id, error))
        except Exception as error:
            self._perform(self._session.refused(job.response_id, internal("prepare", error)))

    async def _pump(self, command: GenerateCommand) -> None:
        """Engine events of one response -> session, as fast as the client reads."""
        name = command.request_id
        if name in self._early:
            self._early.discard(name)
            self._perform(self._session.cancelled(name))
            return
        self._pumps.add(name)
        try:
            async with aclosing(self._state.client.submit(command)) as stream:
                async for event in stream:
                    self._perform(self._session.engine_event(name, event))
                    await self._outbox.room()
            error = SpecserveError("the engine ended the request without a result")
        except SpecserveError as refusal:
            error = refusal
        except Exception as bug:
            await self._state.abort(name)
            error = internal("response", bug)
        finally:
            self._pumps.discard(name)
        # Changes nothing where the terminal event came, as it should.
        self._perform(self._session.failed(name, error))
