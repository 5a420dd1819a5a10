"""A small client of the WebSocket protocol, for the commands here: many responses on one socket, by stream id."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException

from specserve.core.errors import SpecserveError

CLOSE_SECONDS = 2.0
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error")


class Socket:
    """One connection. `stream(...)` yields the events of one response; several may run at once.

    Raises:
        SpecserveError: a key that no header can carry; on entering, a wrong address or no server there.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise SpecserveError("--api-key: must be printable ASCII text", param="api_key")
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._queues: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._names = itertools.count()

    async def __aenter__(self) -> Socket:
        try:
            self._connection: ClientConnection = await connect(
                self._url, additional_headers=self._headers, max_size=None, close_timeout=CLOSE_SECONDS
            )
        except InvalidURI:
            raise SpecserveError(
                f"--url: {self._url!r} must look like ws://host:port/v1/responses", param="url"
            ) from None
        except InvalidStatus as error:
            status = error.response.status_code
            raise SpecserveError(f"{self._url} refused the connection with status {status}", param="url") from None
        except (OSError, ValueError, WebSocketException) as error:
            raise SpecserveError(
                f"cannot reach {self._url} ({error}); start a server with: specserve serve", param="url"
            ) from None
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._connection.close()

    async def stream(self, options: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Events of one `response.create` up to its terminal event.

        Raises:
            SpecserveError: the server refused the request, it failed, or the connection ended.
        """
        name = f"s{next(self._names)}"
        queue = self._queues[name] = asyncio.Queue()
        try:
            await self._send({"type": "response.create", "stream_id": name, **options})
            while True:
                event = await queue.get()
                if event["type"] in ("error", "response.failed"):
                    raise _error(event)
                yield event
                if event["type"] in TERMINAL:
                    return
        finally:
            del self._queues[name]

    async def cancel(self, response_id: str) -> None:
        """Ask the server to end a response; its stream then ends with response.cancelled.

        Raises:
            SpecserveError: the connection ended.
        """
        await self._send({"type": "response.cancel", "response_id": response_id})

    async def _send(self, event: Mapping[str, Any]) -> None:
        try:
            await self._connection.send(orjson.dumps(event).decode())
        except ConnectionClosed as closed:
            raise SpecserveError(_ended(closed), code="closed") from None

    async def _read(self) -> None:
        lost: dict[str, Any] = {"type": "error", "error": {"message": "the connection ended", "code": "closed"}}
        try:
            while True:
                event = orjson.loads(await self._connection.recv())
                queue = self._queues.get(event.get("stream_id"))
                if queue is not None:
                    queue.put_nowait(event)
        except ConnectionClosed as closed:
            lost["error"]["message"] = _ended(closed)
        finally:
            for queue in self._queues.values():
                queue.put_nowait(lost)


def _ended(closed: ConnectionClosed) -> str:
    frame = closed.rcvd or closed.sent
    return f"the connection ended: {frame.reason or frame.code if frame else 'the server went away'}"


def _error(event: Mapping[str, Any]) -> SpecserveError:
    found = event.get("error") or (event.get("response") or {}).get("error") or {}
    return SpecserveError(
        str(found.get("message", "the server reported an error")),
        param=found.get("param"),
        code=str(found.get("code", "server_error")),
    )
