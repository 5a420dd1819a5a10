"""The loop around an engine, the same in a thread and in a process of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from specserve.core.errors import SpecserveError
from specserve.core.messages import Command, Event
from specserve.engine.engine import Engine
from specserve.engine.faults import describe

logger = logging.getLogger(__name__)
MAX_FAULTS = 3  # in a row; then the engine counts as broken


def run_loop(
    engine: Engine,
    receive: Callable[[float | None], Sequence[Command] | None],
    deliver: Callable[[Sequence[Event]], None],
) -> None:
    """Step the engine until `receive` gives None.

    Args:
        receive: waits for commands, for so many seconds at most (None: without limit).
        deliver: takes the events of a step.

    Raises:
        Exception: the engine's own state is at fault, several times in a row.
    """
    faults = 0
    while True:
        pause = engine.pause()
        engine.watchdog.wait(pause)
        commands = receive(pause)
        if commands is None:
            return
        engine.watchdog.turn()
        try:
            for command in commands:
                engine.handle(command)
            events = engine.step()
            faults = 0
        except Exception as error:
            faults += 1
            logger.error("the engine's loop failed: %s", describe(error))
            events = engine.fail_all(SpecserveError("the engine failed while this request ran"))
            if faults == MAX_FAULTS:
                deliver(events)
                raise
        if events:
            deliver(events)
