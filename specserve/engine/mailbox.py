"""Mailboxes: events on their way from the engine's thread to the consumers of single requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from specserve.core.messages import DeltaEvent, Event, ProgressEvent


def merge(deltas: Sequence[DeltaEvent]) -> DeltaEvent:
    """One delta that says what several in a row say."""
    first = deltas[0]
    if len(deltas) == 1:
        return first
    return DeltaEvent(
        first.request_id,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        tuple(step for delta in deltas for step in delta.speculation),
    )


class Mailbox:
    """Events of one request. One thread puts, one consumer takes.

    What a slow consumer finds is bounded by its output's length: deltas that wait are merged into one when they are
    taken, and of progress only the latest is kept.

    Args:
        notify: called, by the thread that puts, after each put.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()

    def put(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, ProgressEvent) and self._events and isinstance(self._events[-1], ProgressEvent):
                self._events.pop()
            self._events.append(event)
        self._notify()

    def take(self) -> Event | None:
        """The next event, or None."""
        with self._lock:
            if not self._events:
                return None
            event = self._events.popleft()
            if not isinstance(event, DeltaEvent):
                return event
            deltas = [event]
            while self._events and isinstance(self._events[0], DeltaEvent):
                deltas.append(self._events.popleft())  # type: ignore[arg-type]
        return merge(deltas)


class Mailboxes:
    """The open mailboxes by request id. Events of other ids are dropped."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}

    def __len__(self) -> int:
        return len(self._boxes)

    def open(self, request_id: str, notify: Callable[[], None]) -> Mailbox | None:
        """A new mailbox; None if the id has one already."""
        box = Mailbox(notify)
        return box if self._boxes.setdefault(request_id, box) is box else None

    def close(self, request_id: str) -> None:
        self._boxes.pop(request_id, None)

    def deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            box = self._boxes.get(event.request_id)
            if box is not None:
                box.put(event)
