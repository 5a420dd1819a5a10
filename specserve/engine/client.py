"""AsyncEngineClient: one asyncio interface over an engine in a thread or in a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from specserve.core.errors import InvalidRequestError, SpecserveError
from specserve.core.messages import TERMINAL, AbortCommand, EngineStats, Event, GenerateCommand
from specserve.engine.backend import Backend
from specserve.engine.faults import failed_event
from specserve.engine.mailbox import Mailboxes


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
        await asyncio.to_thread(self._backend.start, self._boxes.deliver)

    @property
    def ready(self) -> bool:
        """An engine runs and takes commands at once; while it is started again requests wait instead."""
        return self._backend.ready

    @property
    def info(self) -> dict[str, Any]:
        return self._backend.info

    def stats(self) -> EngineStats:
        return self._backend.stats()

    def abort(self, request_id: str) -> None:
        """End a request; its stream then ends with FinishedEvent("cancelled"). Unknown ids are ignored."""
        with contextlib.suppress(SpecserveError):  # no engine any more: it ended otherwise
            self._backend.send(AbortCommand(request_id))

    async def submit(self, command: GenerateCommand) -> AsyncIterator[Event]:
        """Events of one request, the terminal one last. Never raises for the request: that is a FailedEvent.

        Closing or cancelling the iteration aborts the request.
        """
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(news.set)

        box = self._boxes.open(command.request_id, notify)
        if box is None:
            error: SpecserveError = InvalidRequestError("request_id: is in use", param="request_id")
            yield failed_event(command.request_id, error)
            return
        ended = True  # nothing to abort until it is sent
        try:
            try:
                self._backend.send(command)
            except SpecserveError as refused:
                yield failed_event(command.request_id, refused)
                return
            ended = False
            while not ended:
                news.clear()
                while (event := box.take()) is not None:
                    ended = isinstance(event, TERMINAL)
                    yield event
                if not ended:
                    await news.wait()
        finally:
            self._boxes.close(command.request_id)
            if not ended:
                self.abort(command.request_id)

    async def close(self) -> None:
        """End the engine; streams still open end with a FailedEvent."""
        await asyncio.to_thread(self._backend.close)
