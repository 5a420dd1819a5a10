"""Watchdog: sees that requests wait and nothing advances, and says so.

The loop marks what it does; whoever asks compares the marks with the clock, so that a loop which hangs inside a step is
seen as well as one that turns in vain. A stall is told and never ends anything: a step that is only slow would lose
every request with its process. Whoever runs the service decides.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from specserve.core.messages import EngineStats
from specserve.core.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)
STALL_SECONDS = 30.0  # well above the longest step of a huge model
IDLE_POLL = 0.01  # seconds between looks for something to run where nothing could be planned
STALLED, SECONDS = "engine_stalled", "engine_no_progress_seconds"  # gauges

Clock = Callable[[], float]
IDLE = "no step has run"
VAIN = "none has advanced"
STUCK = "one step has run"
SILENT = "the engine process has said nothing"


@dataclass(frozen=True, slots=True)
class Lull:
    """Time without progress while progress is owed.

    Attributes:
        seconds: since the last progress.
        what: what is seen instead, as the middle of a sentence.
    """

    seconds: float
    what: str


class Watchdog:
    """The marks of one engine's loop. Its thread writes them, any thread may read.

    Progress is a token emitted, or a prompt computed further than ever since one was: what a preempted request computes
    again is none. Waiting for nothing but grammars owes no progress.

    Attributes:
        idle: the last schedule planned nothing although a request is ready to run.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.idle = False
        self._clock = clock
        self._since: float | None = None  # of the last progress; None while none is owed
        self._turn: float | None = None  # of the turn's beginning; None while the loop waits for commands
        self._reached: dict[str, int] = {}  # request id -> furthest position computed since a token was emitted

    def turn(self) -> None:
        """The loop takes up commands and a step."""
        self._turn = self._clock()
        if self._since is None:
            self._since = self._turn

    def wait(self, pause: float | None) -> None:
        """The loop waits for commands; `pause` is Engine.pause()."""
        self._turn = None
        if pause is None:
            self.rest()

    def rest(self) -> None:
        """No request is ready to run."""
        self.idle = False
        self._since = None
        self._reached.clear()

    def scheduled(self, plan: StepPlan | None) -> None:
        """Requests are ready to run, and this is what was planned."""
        self.idle = plan is None
        if self._since is None:
            self._since = self._clock()

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        """A step is committed."""
        if any(output.token_ids or output.candidates for output in result.outputs):
            advanced = True
            self._reached.clear()
        else:
            advanced = False
            for request in plan.requests:
                end = request.start + len(request.token_ids)
                if end > self._reached.get(request.request_id, 0):
                    self._reached[request.request_id] = end
                    advanced = True
        if advanced:
            self._since = self._clock()

    def lull(self) -> Lull | None:
        """None while no progress is owed."""
        since, turn = self._since, self._turn
        if since is None:
            return None
        now = self._clock()
        if turn is not None and _most(now - turn, now - since):
            return Lull(now - since, STUCK)
        return Lull(now - since, IDLE if self.idle else VAIN)

    def gauges(self) -> dict[str, float]:
        """For the engine's stats: what ChildWatch reads."""
        lull = self.lull()
        return {STALLED: float(self.idle), SECONDS: lull.seconds if lull is not None else 0.0}


class ChildWatch:
    """The marks of an engine in another process: what it said last, and for how long it has said nothing.

    The engine's loop sends its stats at each wait, at most every half second; no other heartbeat is needed. One thread
    writes, any thread may read.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._heard = 0.0
        self._what = VAIN

    def heard(self, stats: EngineStats) -> None:
        """Its stats have come."""
        self._heard = self._clock()
        self._what = IDLE if stats.counters.get(STALLED) else VAIN
        self._since = self._heard - stats.counters.get(SECONDS, 0.0)

    def owes(self, anything: bool) -> None:
        """Whether it has requests that have not ended. Without any it may be silent for as long as it likes."""
        if not anything:
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    def lull(self) -> Lull | None:
        """None while no progress is owed."""
        since = self._since
        if since is None:
            return None
        now = self._clock()
        silent = _most(now - self._heard, now - since)
        return Lull(now - since, SILENT if silent else self._what)


class Alarm:
    """The verdict on a lull. Logs once that a stall begins and once that it ends. Thread-safe.

    Args:
        limit: seconds without progress that make a stall.
        lull: looks at the marks.
        waiting: counts the requests that have not ended; a stall needs one.
    """

    def __init__(self, limit: float, lull: Callable[[], Lull | None], waiting: Callable[[], int]) -> None:
        self._limit = limit
        self._lull = lull
        self._waiting = waiting
        self._stalled = False
        self._lock = threading.Lock()

    def reason(self) -> str | None:
        """One sentence with numbers while the engine is stalled, else None."""
        with self._lock:  # around the look as well: an older one must not be the last to speak
            reason = self._look()
            if (reason is not None) != self._stalled:
                self._stalled = reason is not None
                if reason is not None:
                    logger.warning("the engine is stalled: %s", reason)
                else:
                    logger.warning("the engine is no longer stalled")
        return reason

    def due(self) -> float | None:
        """Seconds after which `reason` may change by the clock alone; None where only news can change it."""
        lull = self._lull()
        return None if lull is None or self._stalled else max(self._limit - lull.seconds, 0.0)

    def mark(self, stats: EngineStats) -> EngineStats:
        """The stats with the verdict of this moment."""
        lull = self._lull()
        gauges = {STALLED: float(self.reason() is not None), SECONDS: lull.seconds if lull is not None else 0.0}
        return replace(stats, counters={**stats.counters, **gauges})

    def _look(self) -> str | None:
        lull, waiting = self._lull(), self._waiting()
        if lull is None or not waiting or lull.seconds < self._limit:
            return None
        who = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
        return f"{who} and {lull.what} for {lull.seconds:.0f} s"


def _most(part: float, whole: float) -> bool:
    return part > whole / 2
