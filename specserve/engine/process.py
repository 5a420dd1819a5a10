"""EngineProcess: an engine in a supervised child process.

One thread of the parent talks to the child. If the child dies, each request that was sent to it fails with one typed
error, the child is started again, and commands given meanwhile wait for it. If it dies again and again, or cannot
start, everything that waits fails and so does every later command. A child that lives but does not advance is reported
as stalled and left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from specserve.core import errors
from specserve.core.config import EngineConfig
from specserve.core.errors import EngineDeadError, InvalidRequestError, SpecserveError
from specserve.core.messages import AbortCommand, Command, EngineStats, FinishedEvent, GenerateCommand, Usage
from specserve.engine import codec
from specserve.engine.backend import Deliver
from specserve.engine.child_process import ChildProcess
from specserve.engine.ledger import Ledger
from specserve.engine.watchdog import STALL_SECONDS, Alarm, ChildWatch

logger = logging.getLogger(__name__)
LAST_WORDS_MS = 20
CLOSED = "the engine was closed"
BUILDER = "specserve.cluster.build:build_served_engine"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to give up, and when to say that nothing advances.

    Attributes:
        max_deaths: so many deaths within `window` seconds are followed by a new start; one more is the last.
        backoff: seconds before the second start within the window; doubled for each further one.
        grace: seconds that a child has to end by itself.
        stall: seconds without progress or word, while requests wait, after which the child counts as stalled; above
            the interval of its stats (0.5 s). It is not killed: that would fail its requests, and it may be only slow.
    """

    max_deaths: int = 4
    window: float = 120.0
    backoff: float = 0.5
    grace: float = 5.0
    stall: float = STALL_SECONDS


class EngineProcess:
    """A Backend. `progress` gets what the builder reports while it loads, from the supervising thread."""

    def __init__(
        self,
        config: EngineConfig,
        builder: str = BUILDER,
        *,
        progress: Callable[..., None] | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._config = config
        self._builder = builder
        self._progress = progress
        self._policy = policy or RestartPolicy()
        self._deliver: Deliver = lambda events: None
        self._ledger = Ledger()
        self._watch = ChildWatch()
        self._alarm = Alarm(self._policy.stall, lambda: self._watch.lull(), self._ledger.__len__)
        self._lock = threading.Lock()  # guards _unsent and _end together with the ledger's openings
        self._unsent: deque[tuple[Command, bytes]] = deque()
        self._end: str | None = None  # why no command is taken any more
        self._closing = False
        self._ready = False
        self._started = threading.Event()
        self._start_error: SpecserveError | None = None
        self._info: dict[str, Any] = {}
        self._stats = EngineStats()
        self._deaths: deque[float] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        atexit.register(self.close)  # for an owner that forgets: no daemon thread runs into the interpreter's end
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:
            self.close()
            raise
        if self._start_error is not None:
            self.close()
            raise self._start_error

    def send(self, command: Command) -> None:
        data = codec.encode_command(command)
        with self._lock:
            if self._end is not None:
                raise EngineDeadError(self._end)
            if isinstance(command, GenerateCommand):
                if not self._ledger.open(command.request_id):
                    raise InvalidRequestError("request_id: is in use", param="request_id")
                self._unsent.append((command, data))
                unsent = None
            else:
                unsent = self._take_unsent(command)
                if unsent is None:
                    self._unsent.append((command, data))
        if unsent is not None:
            usage = Usage(prompt_tokens=len(unsent.prompt_token_ids))
            cancelled = FinishedEvent(unsent.request_id, "cancelled", usage, unsent.params.seed or 0)
            self._deliver(self._ledger.pass_on([cancelled]))
        self._wake()

    @property
    def ready(self) -> bool:
        return self._ready

    @property
    def stalled(self) -> bool:
        return self._alarm.reason() is not None

    @property
    def stall_reason(self) -> str | None:
        return self._alarm.reason()

    @property
    def info(self) -> dict[str, Any]:
        """Also `pid`, the child's."""
        return dict(self._info)

    def stats(self) -> EngineStats:
        return self._alarm.mark(self._stats)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            self._end = self._end or CLOSED
            write, self._wake_write = self._wake_write, -1
        if write >= 0:
            os.close(write)
            os.close(self._wake_read)

    def _take_unsent(self, command: AbortCommand) -> GenerateCommand | None:
        """The request to abort, removed, if no child has it yet."""
        for entry in self._unsent:
            if isinstance(entry[0], GenerateCommand) and entry[0].request_id == command.request_id:
                self._unsent.remove(entry)
                return entry[0]
        return None

    def _wake(self) -> None:
        # A full pipe wakes as well; a closed one has nobody to wake.
        with self._lock:
            if self._wake_write >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"x")

    # The supervising thread.

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        end: SpecserveError = EngineDeadError(CLOSED)
        try:
            while not self._closing:
                end = self._live_once(context)
                if not self._started.is_set():
                    self._start_error = end
                    break
                if self._closing or not self._may_restart():
                    break
        except Exception as error:  # the supervisor's own fault: end, rather than leave requests waiting
            logger.error("the supervisor failed (%s)", type(error).__name__)
            end = EngineDeadError("the engine's supervisor failed")
            self._start_error = self._start_error or end
        finally:
            dead = EngineDeadError(CLOSED if self._closing else f"the engine is down: {end.message}")
            with self._lock:
                self._end = dead.message
                self._unsent.clear()
            self._deliver(self._ledger.fail(dead))
            context.term()
            if not self._started.is_set():
                self._start_error = self._start_error or dead
                self._started.set()

    def _live_once(self, context: zmq.Context[zmq.Socket[bytes]]) -> SpecserveError:
        """Run one child from its start to its end; what to tell those who waited for it."""
        child = ChildProcess(context, self._config, self._builder, self._wake)
        failure: SpecserveError | None = None
        try:
            poller = zmq.Poller()
            poller.register(child.socket, zmq.POLLIN)
            poller.register(self._wake_read, zmq.POLLIN)
            while not self._closing and not child.dead and failure is None:
                due = self._alarm.due()
                poller.poll(None if due is None else int(due * 1000) + 1)
                self._drain_wakes()
                failure = self._receive(child)
                self._flush(child)
                self._watch.owes(self._ready and len(self._ledger) > 0)
                self._alarm.reason()
            # What it said last may still be on its way.
            while not self._closing and failure is None and child.socket.poll(LAST_WORDS_MS):
                failure = self._receive(child)
        finally:
            self._ready = False
            self._watch = ChildWatch()
            self._alarm.reason()
            child.close(self._policy.grace)
        how = child.how_it_ended()
        if not self._closing and failure is None:
            logger.error("the engine process %s", how)
        error = EngineDeadError(f"the engine process {how} while this request ran; it is being started again")
        with self._lock:
            unsent = {c.request_id for c, _ in self._unsent if isinstance(c, GenerateCommand)}
            failed = self._ledger.fail(error, keep=unsent)
        self._deliver(failed)
        self._stats = EngineStats(counters=self._stats.counters)
        return failure or EngineDeadError(f"the engine process {how}")

    def _may_restart(self) -> bool:
        """Wait out the back-off; False if it is time to give up."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > self._policy.window:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self._policy.max_deaths:
            logger.error("the engine process died %d times within %g s; giving up", count, self._policy.window)
            return False
        until = now + (self._policy.backoff * 2 ** (count - 2) if count > 1 else 0.0)
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._closing and (left := until - time.monotonic()) > 0:
            poller.poll(int(left * 1000) + 1)
            self._drain_wakes()
        return not self._closing

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def _receive(self, child: ChildProcess) -> SpecserveError | None:
        """Take in what the child says; its start-up failure if it tells one."""
        failure = None
        for message in child.receive():
            tag, body = codec.unpack(message)
            if tag == codec.EVENTS:
                self._deliver(self._ledger.pass_on(codec.decode_events(body)))
            elif tag == codec.STATS:
                self._stats = codec.decode_stats(body)
                self._watch.heard(self._stats)
            elif tag == codec.READY:
                self._info = codec.unpack_body(body)
                self._ready = True
                self._started.set()
            elif tag == codec.PROGRESS:
                self._report(codec.unpack_body(body))
            elif tag == codec.FAILED:
                failure = _rebuild(codec.unpack_body(body))
        return failure

    def _report(self, values: list[Any]) -> None:
        if self._progress is not None:
            try:
                self._progress(*values)
            except Exception as error:  # a fault of the display must not take the engine down
                logger.error("progress cannot be shown (%s)", type(error).__name__)

    def _flush(self, child: ChildProcess) -> None:
        if not self._ready:
            return
        while True:
            with self._lock:
                if not self._unsent:
                    return
                _, data = self._unsent.popleft()
                # Inside the lock: an abort must not overtake its request.
                child.send(data)


def _rebuild(values: dict[str, Any]) -> SpecserveError:
    kind = getattr(errors, values["kind"], SpecserveError)
    if not (isinstance(kind, type) and issubclass(kind, SpecserveError)):
        kind = SpecserveError
    return kind(values["message"], param=values["param"], code=values["code"])
