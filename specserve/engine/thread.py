"""EngineThread: an engine in a thread of this process, for the Python API."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from specserve.core.errors import EngineDeadError, InvalidRequestError
from specserve.core.messages import Command, EngineStats, Event, GenerateCommand
from specserve.engine.backend import Deliver
from specserve.engine.checks import Vocabulary
from specserve.engine.engine import Engine
from specserve.engine.faults import describe
from specserve.engine.ledger import Ledger
from specserve.engine.loop import run_loop
from specserve.engine.watchdog import STALL_SECONDS, Alarm, Lull

logger = logging.getLogger(__name__)


def engine_info(engine: Engine) -> dict[str, Any]:
    """What a Backend's `info` holds."""
    return {
        "max_model_len": engine.limits.max_model_len,
        "vocab_size": engine.vocabulary.vocab_size,
        "numerics": engine.limits.numerics,
        "weights": engine.limits.weights,
        "kv_tokens": engine.kv.max_positions,
    }


def _built_already() -> Engine:
    raise EngineDeadError("the engine was built and closed")


class EngineThread:
    """Builds the engine in its thread (thread settings of math libraries belong to the calling thread) and runs it.

    Args:
        build: makes the engine; called once, in the thread.
        stall: seconds without progress that count as a stall. The log tells of a loop that hangs when somebody asks.
    """

    def __init__(self, build: Callable[[], Engine], *, stall: float = STALL_SECONDS) -> None:
        self._build = build
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._ledger = Ledger()
        self._alarm = Alarm(stall, self._lull, self._ledger.__len__)
        self._deliver: Deliver = lambda events: None
        self._built = threading.Event()
        self._engine: Engine | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._lock = threading.Lock()  # between `send` and the end: no command is accepted and then forgotten
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._thread.start()
        self._built.wait()
        if self._error is not None:
            raise self._error

    def send(self, command: Command) -> None:
        with self._lock:
            if self._stopping or self._engine is None:
                raise EngineDeadError("the engine does not run")
            if isinstance(command, GenerateCommand) and not self._ledger.open(command.request_id):
                raise InvalidRequestError("request_id: is in use", param="request_id")
            self._commands.put(command)

    @property
    def ready(self) -> bool:
        return self._engine is not None and not self._stopping

    @property
    def stalled(self) -> bool:
        return self._alarm.reason() is not None

    @property
    def stall_reason(self) -> str | None:
        return self._alarm.reason()

    @property
    def info(self) -> dict[str, Any]:
        engine = self._engine
        return engine_info(engine) if engine is not None else {}

    @property
    def vocabulary(self) -> Vocabulary:
        """The engine's tokenizer; only after `start`."""
        if self._engine is None:
            raise EngineDeadError("the engine does not run")
        return self._engine.vocabulary

    def stats(self) -> EngineStats:
        engine = self._engine
        return self._alarm.mark(engine.stats()) if engine is not None else EngineStats()

    def close(self) -> None:
        with self._lock:
            self._stopping = True
        self._commands.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._error = error
            self._built.set()
            return
        self._engine = engine
        self._built.set()
        end = "the engine was closed"
        try:
            run_loop(engine, self._receive, self._pass_on)
        except Exception as error:
            end = "the engine ended"
            logger.error("the engine ended: %s", describe(error))
        finally:
            with self._lock:
                self._stopping = True
            engine.close()
            # Weights and KV go now, not when the last reference to this object does.
            self._engine = None
            self._build = _built_already
            self._deliver(self._ledger.fail(EngineDeadError(end)))

    def _lull(self) -> Lull | None:
        engine = self._engine
        return engine.watchdog.lull() if engine is not None else None

    def _receive(self, pause: float | None) -> Sequence[Command] | None:
        self._alarm.reason()  # tells of the loop's own stalls, and that one is over
        commands: list[Command] = []
        while True:
            try:
                # Waits for the first only; what else is there comes along.
                wait = not commands and pause != 0.0
                command = self._commands.get(wait, pause if wait else None)
            except queue.Empty:
                return commands
            if command is None:
                return None
            commands.append(command)

    def _pass_on(self, events: Sequence[Event]) -> None:
        self._deliver(self._ledger.pass_on(events))
