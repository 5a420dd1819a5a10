"""Events of one request as an async generator, whatever the engine runs in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from specserve.core.errors import InvalidRequestError, SpecserveError
from specserve.core.messages import TERMINAL, AbortCommand, Event, GenerateCommand
from specserve.engine.backend import Backend
from specserve.engine.faults import failed_event
from specserve.engine.mailbox import Mailboxes


async def stream_events(backend: Backend, boxes: Mailboxes, command: GenerateCommand) -> AsyncGenerator[Event, None]:
    """Events of one request, the terminal one last. Never raises for the request: that is a FailedEvent.

    Closing or cancelling the iteration aborts the request.
    """
    loop = asyncio.get_running_loop()
    news = asyncio.Event()

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(news.set)

    box = boxes.open(command.request_id, notify)
    if box is None:
        yield failed_event(command.request_id, InvalidRequestError("request_id: is in use", param="request_id"))
        return
    ended = True  # nothing to abort until it is sent
    try:
        try:
            backend.send(command)
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
        boxes.close(command.request_id)
        if not ended:
            abort(backend, command.request_id)


def abort(backend: Backend, request_id: str) -> None:
    """End a request; unknown ids are ignored."""
    with contextlib.suppress(SpecserveError):  # no engine any more: it ended otherwise
        backend.send(AbortCommand(request_id))
