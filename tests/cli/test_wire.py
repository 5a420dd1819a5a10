"""The small client against the server as it is."""

from __future__ import annotations

from specserve.cli.wire import Socket
from tests.fakes.server import in_loop, running


@in_loop
async def test_cancel_ends_the_stream() -> None:
    async with running() as server:
        server.client.gate.clear()
        kinds = []
        async with Socket(f"ws://127.0.0.1:{server.server.port}/v1/responses") as socket:
            async for event in socket.stream({"input": "hello"}):
                kinds.append(event["type"])
                if event["type"] == "response.created":
                    await socket.cancel(event["response"]["id"])
        assert kinds[-1] == "response.cancelled"
