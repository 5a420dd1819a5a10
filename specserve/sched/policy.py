"""Admission order: priority first, then requests that were preempted, then arrival; bounded skip-ahead with ageing.

A request that does not fit now may be passed by smaller ones behind it, so that one large request does not idle the
machine; each pass ages it, and once it has been passed `patience` times nothing overtakes it until it runs.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Callable, Iterator

from specserve.core.request import Request, Status

MAX_HELD = 256  # held requests that one step looks at: a long queue of them must cost little


class Verdict(enum.Enum):
    """What trying to admit one request gave."""

    ADMITTED = "admitted"
    BLOCKED = "blocked"  # does not fit now; others may pass it
    HELD = "held"  # better off a little later, whatever room there is; others pass without ageing it
    UNABLE = "unable"  # can never fit any more; does not hold the others up
    STOP = "stop"  # the step is full


_RAN_BEFORE = frozenset({Status.PREEMPTED, Status.SWAPPED})


def admission_order(request: Request) -> tuple[int, bool, int, int]:
    """Sort key of waiting requests. A beam that waits belongs to a search that ran before."""
    family = request.family
    ran = request.status in _RAN_BEFORE or (family is not None and family.in_step and request.index > 0)
    return (request.priority, not ran, request.arrival, request.index)


def running_order(request: Request) -> tuple[int, int, int]:
    """Sort key of running requests: the first is served first, the last is preempted first."""
    return (request.priority, request.arrival, request.index)


class WaitingQueue:
    """Requests without KV, in admission order.

    Args:
        window: blocked requests that may be passed within one step; 0 is strict order.
        patience: times that a request is passed at most.
    """

    __slots__ = ("_passed", "_queue", "patience", "window")

    def __init__(self, window: int = 8, patience: int = 32) -> None:
        self.window = window
        self.patience = patience
        self._queue: list[Request] = []
        self._passed: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @property
    def has_ready(self) -> bool:
        """Somebody waits who could run: not only for a grammar."""
        return any(r.status is not Status.COMPILING for r in self._queue)

    def push(self, request: Request) -> None:
        insort(self._queue, request, key=admission_order)

    def remove(self, request: Request) -> None:
        self._queue.remove(request)
        self._passed.pop(request.request_id, None)

    def admit(self, attempt: Callable[[Request], Verdict]) -> None:
        """Offer requests in order to `attempt`, which admits them or says why not. Those admitted leave the queue.

        A request whose grammar is still being compiled keeps its place and is passed without ageing, as is one that is
        held, so many of these at most.
        """
        blocked: list[Request] = []
        held = 0
        i = 0
        while i < len(self._queue):
            request = self._queue[i]
            if request.status is Status.COMPILING:
                i += 1
                continue
            verdict = attempt(request)
            if verdict is Verdict.STOP:
                return
            if verdict is Verdict.HELD:
                i += 1
                held += 1
                if held == MAX_HELD:
                    return
                continue
            if verdict is Verdict.ADMITTED:
                assert self._queue[i] is request, "only later ones leave with it"
                del self._queue[i]
                self._passed.pop(request.request_id, None)
                for waits in blocked:
                    self._passed[waits.request_id] = self._passed.get(waits.request_id, 0) + 1
                if any(self._passed[waits.request_id] >= self.patience for waits in blocked):
                    return
                continue
            i += 1
            if verdict is Verdict.BLOCKED:
                blocked.append(request)
                if len(blocked) > self.window or self._passed.get(request.request_id, 0) >= self.patience:
                    return

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        keys = [admission_order(r) for r in self._queue]
        assert keys == sorted(keys)
        ids = {r.request_id for r in self._queue}
        assert len(ids) == len(keys)
        assert self._passed.keys() <= ids
        assert all(n <= self.patience for n in self._passed.values())
