"""Ledger: which requests still owe their owner a terminal event. Every owner gets exactly one."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from specserve.core.messages import TERMINAL, Event
from specserve.engine.faults import failed_event


class Ledger:
    """Open request ids. Thread-safe."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str) -> bool:
        """False, and nothing changes, if the id is open already."""
        with self._lock:
            if request_id in self._open:
                return False
            self._open.add(request_id)
            return True

    def pass_on(self, events: Sequence[Event]) -> list[Event]:
        """The events of open requests; a terminal one closes its request."""
        passed = []
        with self._lock:
            for event in events:
                if event.request_id in self._open:
                    passed.append(event)
                    if isinstance(event, TERMINAL):
                        self._open.discard(event.request_id)
        return passed

    def fail(self, error: BaseException, keep: Collection[str] = ()) -> list[Event]:
        """Close all but `keep`; their terminal events."""
        with self._lock:
            ended = sorted(self._open.difference(keep))
            self._open.difference_update(ended)
        return [failed_event(request_id, error) for request_id in ended]
