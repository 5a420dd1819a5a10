"""A real uvicorn server on a free port, in the test's own event loop, over a fake engine client."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from specserve.core.config import ServerConfig
from specserve.server.serve import Server, bind
from tests.fakes.client import FakeClient, FakeTokenizer

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own, with a limit that only a hang reaches."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


class Running:
    """A server that listens."""

    def __init__(self, server: Server, client: FakeClient) -> None:
        self.server = server
        self.client = client
        self.state = server._app.state.server
        self.task: asyncio.Task[None] | None = None

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def connect(self, **options: Any) -> connect:
        options.setdefault("max_size", None)
        options.setdefault("proxy", None)
        return connect(f"ws://127.0.0.1:{self.server.port}/v1/responses", **options)


@asynccontextmanager
async def running(client: FakeClient | None = None, tokenizer: Any = None, **config: Any) -> AsyncIterator[Running]:
    """Start, wait until it serves, drain at the end."""
    client = client or FakeClient()
    settings = ServerConfig(port=0, **{"drain_seconds": 0.0, **config})
    ready = asyncio.Event()
    server = Server(
        client, tokenizer or FakeTokenizer(), settings, "fake", 1000, on_ready=lambda host, port: ready.set()
    )
    handle = Running(server, client)
    handle.task = asyncio.ensure_future(server.serve([bind(settings)]))
    try:
        await ready.wait()
        yield handle
    finally:
        server.stop()
        await handle.task


async def send(socket: ClientConnection, **event: Any) -> None:
    await socket.send(orjson.dumps(event).decode())


async def receive(socket: ClientConnection) -> dict[str, Any]:
    return orjson.loads(await socket.recv())


async def close_code(socket: ClientConnection, *frames: bytes | str) -> int:
    """Send frames as text; read until the server closes; its code."""
    try:
        for frame in frames:
            await socket.send(frame, text=True)
        while True:
            await socket.recv()
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd is not None else 1006


async def until(socket: ClientConnection, *types: str) -> list[dict[str, Any]]:
    """Events up to and with the first of one of these types."""
    events = []
    while not events or events[-1]["type"] not in types:
        events.append(await receive(socket))
    return events


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something that has no event of its own is so; `in_loop`'s limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
