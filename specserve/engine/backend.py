"""What an engine looks like from the side of its users, in this process or in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from specserve.core.messages import Command, EngineStats, Event

Deliver = Callable[[Sequence[Event]], None]


class Backend(Protocol):
    """EngineThread or EngineProcess. All methods may be called from any thread."""

    def start(self, deliver: Deliver) -> None:
        """Start, and block until ready. `deliver` is called with events, from another thread.

        Raises:
            SpecserveError: what kept it from starting.
        """

    def send(self, command: Command) -> None:
        """Hand a command over without waiting. Exactly one terminal event follows for every request accepted here.

        Raises:
            InvalidRequestError: the command cannot be sent, or its id is in use.
            EngineDeadError: there is no engine any more.
        """

    @property
    def ready(self) -> bool:
        """An engine runs and takes commands at once."""

    @property
    def stalled(self) -> bool:
        """Requests wait and none has advanced for long (see engine.watchdog). Commands are taken all the same."""

    @property
    def stall_reason(self) -> str | None:
        """One sentence with numbers while it is stalled, else None."""

    @property
    def info(self) -> dict[str, Any]:
        """Facts of the running engine: max_model_len, vocab_size, numerics, ..."""

    def stats(self) -> EngineStats:
        """The latest figures; the counter engine_stalled is 1 while it is stalled."""

    def close(self) -> None:
        """End the engine; requests still open fail. Blocks; idempotent."""
