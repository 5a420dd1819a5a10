"""What every connection shares: the engine's client, the tokenizer, the limits, and whether the server stops."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from specserve.core.config import ServerConfig
from specserve.core.errors import OverloadedError, SpecserveError
from specserve.core.messages import Event, GenerateCommand
from specserve.server.limits import Limits
from specserve.server.prompt import ChatTokenizer

log = logging.getLogger("specserve.server")


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def ready(self) -> bool: ...

    def submit(self, command: GenerateCommand) -> AsyncGenerator[Event, None]: ...

    def abort(self, request_id: str) -> Any: ...

    def stats(self) -> Any: ...


class Connection(Protocol):
    """A live WebSocket, as the drain sees it."""

    @property
    def active(self) -> int: ...

    def stop_admitting(self) -> None: ...

    async def shut_down(self) -> None: ...


@dataclass(slots=True)
class ServerState:
    """Made once by create_app."""

    client: EngineClient
    tokenizer: ChatTokenizer
    config: ServerConfig
    limits: Limits
    model: str
    connections: set[Connection] = field(default_factory=set)
    draining: bool = False
    start_error: BaseException | None = None
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
    )

    @property
    def active(self) -> int:
        """Responses that have not ended, over all connections."""
        return sum(connection.active for connection in self.connections)

    @property
    def stall_reason(self) -> str | None:
        """One sentence with numbers while the engine is stalled, else None; a client that cannot tell never is."""
        reason: str | None = getattr(self.client, "stall_reason", None)
        return reason

    async def abort(self, request_id: str) -> None:
        await _settle(self.client.abort(request_id))

    async def stats(self) -> Any:
        return await _settle(self.client.stats())

    def admit(self) -> None:
        """Raises OverloadedError while the server stops."""
        if self.draining:
            raise OverloadedError("the server is shutting down", code="shutting_down")


async def _settle(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def internal(where: str, error: BaseException) -> SpecserveError:
    """Log an unexpected exception and give the typed error that stands for it.

    The exception's own words are not logged: they may quote a prompt, a schema or output.
    """
    trace, place = error.__traceback__, "?"
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    log.error("internal error in %s: %s at %s", where, type(error).__name__, place)
    return SpecserveError("internal error; the server's log tells where", code="server_error")
