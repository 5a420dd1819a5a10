"""One request over HTTP: nothing keeps it alive once its client is gone."""

import asyncio
from types import SimpleNamespace

from specserve.server.generate import GenerationResponse


def test_trap_d8_a_cancellation_is_not_lost_when_a_message_goes_out_at_that_moment():
    async def run():
        state = SimpleNamespace(limits=SimpleNamespace(slow_client_seconds=60))
        response = GenerationResponse(state, None, None, None)
        out = asyncio.Event()

        async def send(message):
            await out.wait()

        async def work():
            await response._body(send, b"text", True)
            await asyncio.Event().wait()  # for the engine's next word

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        out.set()
        await asyncio.sleep(0)  # it is out, and nobody has been told yet
        task.cancel()
        ended, _ = await asyncio.wait({task}, timeout=5)
        task.cancel()
        assert ended, "the request goes on without its client"

    asyncio.run(run())
