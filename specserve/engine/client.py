"""AsyncEngineClient: one asyncio interface over an engine in a thread or in a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from specserve.core.messages import EngineStats, Event, GenerateCommand
from specserve.engine.backend import Backend
from specserve.engine.mailbox import Mailboxes
from specserve.engine.streaming import abort, stream_events


class AsyncEngineClient:
    """Submits requests and streams their events. Serves any number of event loops at once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._boxes = Mailboxes()

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises:
            SpecserveError: what kept it from starting.
        """
        try:
            await asyncio.to_thread(self._backend.start, self._boxes.deliver)
        except asyncio.CancelledError:
            # The thread still waits for the engine: end that, or the event loop's executor waits for the thread.
            await self.close()
            raise

    @property
    def ready(self) -> bool:
        """An engine runs and takes commands at once; while it is started again requests wait instead."""
        return self._backend.ready

    @property
    def stalled(self) -> bool:
        """Requests wait and none has advanced for long. Submits and aborts are taken all the same."""
        return self._backend.stalled

    @property
    def stall_reason(self) -> str | None:
        """One sentence with numbers while it is stalled, else None."""
        return self._backend.stall_reason

    @property
    def info(self) -> dict[str, Any]:
        """Facts of the running engine: max_model_len, vocab_size, numerics."""
        return self._backend.info

    def stats(self) -> EngineStats:
        return self._backend.stats()

    def submit(self, command: GenerateCommand) -> AsyncGenerator[Event, None]:
        """Events of one request, the terminal one last; it is sent when the iteration begins.

        Never raises for the request: that is a FailedEvent. Closing or cancelling the iteration aborts the request.
        """
        return stream_events(self._backend, self._boxes, command)

    def abort(self, request_id: str) -> None:
        """End a request; its stream then ends with FinishedEvent("cancelled"). Unknown ids are ignored."""
        abort(self._backend, request_id)

    async def close(self) -> None:
        """End the engine; streams still open end with a FailedEvent."""
        await asyncio.to_thread(self._backend.close)
