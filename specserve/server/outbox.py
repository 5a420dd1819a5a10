"""Outbox: the bounded buffer of unsent frames of one connection, and the moment when its client is too slow."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable


class Outbox:
    """Frames wait here for the writer. Producers wait for `room()`, so a slow client pauses them.

    Args:
        limit: bytes; producers pause from half of it on, so that what they add at once still fits.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._high = max(limit // 2, 1)
        self._clock = clock
        self._frames: deque[bytes] = deque()
        self._size = 0
        self._full_since: float | None = None
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def size(self) -> int:
        """Bytes that are not handed to the transport yet."""
        return self._size

    def put(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._size += len(frame)
        self._filled.set()
        self._empty.clear()
        if self._size >= self._high and self._full_since is None:
            self._full_since = self._clock()
            self._room.clear()

    async def room(self) -> None:
        """Wait until more may be put."""
        await self._room.wait()

    async def first(self) -> bytes:
        """The oldest frame; it counts as unsent until `sent`."""
        while not self._frames:
            self._filled.clear()
            await self._filled.wait()
        return self._frames[0]

    def sent(self) -> None:
        """The oldest frame went out."""
        self._size -= len(self._frames.popleft())
        if self._size < self._high:
            self._full_since = None
            self._room.set()
        if not self._frames:
            self._empty.set()

    async def drained(self) -> None:
        """Wait until everything is sent."""
        await self._empty.wait()

    def stuck_for(self) -> float:
        """Seconds for which the buffer has been full without a break."""
        return 0.0 if self._full_since is None else self._clock() - self._full_since
