"""An event loop in a thread of its own, so that the main thread keeps the terminal: input, line editing, Ctrl-C."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_SECONDS = 0.1


class BackgroundLoop:
    """Runs coroutines while the caller, who must be the main thread, waits.

    A thread that blocks in input() cannot be interrupted, and the event loop cannot answer pings while it blocks;
    so the loop is the one that moves to another thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specserve-chat", daemon=True)

    def __enter__(self) -> BackgroundLoop:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], on_interrupt: Callable[[], None] | None = None) -> T:
        """The result of `work`. Until it is there each Ctrl-C calls `on_interrupt` inside the loop, if given."""
        call = on_interrupt
        if call is None:
            return self._wait(work)

        def interrupted(*_: object) -> None:
            self._loop.call_soon_threadsafe(call)

        before = signal.signal(signal.SIGINT, interrupted)
        try:
            return self._wait(work)
        finally:
            signal.signal(signal.SIGINT, before)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        # A signal that comes just before a thread blocks does not wake it: its handler runs at the next look.
        while not concurrent.futures.wait([future], LOOK_SECONDS).done:
            pass
        return future.result()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
