"""Mailboxes: events on their way from the engine's thread to the consumers of single requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from specserve.core.messages import ChoiceFinishedEvent, DeltaEvent, Event, ProgressEvent


def merge(deltas: Sequence[DeltaEvent]) -> DeltaEvent:
    """One delta that says what several of one choice in a row say."""
    first = deltas[0]
    if len(deltas) == 1:
        return first
    return DeltaEvent(
        first.request_id,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        tuple(step for delta in deltas for step in delta.speculation),
        first.index,
    )


class Mailbox:
    """Events of one request. One thread puts, one consumer takes.

    What a slow consumer finds is bounded by its output's length: deltas of one choice that wait are merged into one
    when they are taken, and of progress only the latest is kept. Events of one choice keep their order. A delta may
    overtake events of other choices (they stream side by side), never an event of the whole request.

    Args:
        notify: called, by the thread that puts, after each put.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._waiting: deque[Event | list[DeltaEvent]] = deque()
        self._growing: dict[int, list[DeltaEvent]] = {}  # choice -> its entry of `_waiting` that takes more deltas
        self._lock = threading.Lock()

    def put(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, DeltaEvent):
                self._put_delta(event)
            else:
                self._put_other(event)
        self._notify()

    def take(self) -> Event | None:
        """The next event, or None."""
        with self._lock:
            if not self._waiting:
                return None
            entry = self._waiting.popleft()
            if not isinstance(entry, list):
                return entry
            if self._growing.get(entry[0].index) is entry:
                del self._growing[entry[0].index]
        return merge(entry)

    def _put_delta(self, event: DeltaEvent) -> None:
        entry = self._growing.get(event.index)
        if entry is None:
            entry = self._growing[event.index] = []
            self._waiting.append(entry)
        entry.append(event)

    def _put_other(self, event: Event) -> None:
        if isinstance(event, ChoiceFinishedEvent):
            self._growing.pop(event.index, None)
        else:
            self._growing.clear()
        last = self._waiting[-1] if self._waiting else None
        if isinstance(event, ProgressEvent) and isinstance(last, ProgressEvent):
            self._waiting.pop()
        self._waiting.append(event)


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
