"""Run the application on uvicorn, in this process, until SIGTERM, SIGINT or `stop()`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from specserve.core.config import ServerConfig
from specserve.core.errors import ConfigError
from specserve.server.app import create_app, drain
from specserve.server.prompt import ChatTokenizer
from specserve.server.protocol import WebSocketProtocol
from specserve.server.state import EngineClient

Address = Callable[[str, int], None]
log = logging.getLogger("specserve.server")


class Server(uvicorn.Server):
    """uvicorn's server that drains before it stops. `run()` blocks; `stop()` may be called from any thread.

    Args:
        on_listening: called with host and real port once connections are accepted.
        on_ready: called with host and real port once the engine serves, after `on_listening`.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: ChatTokenizer,
        config: ServerConfig,
        model_name: str,
        max_model_len: int,
        on_listening: Address | None = None,
        on_ready: Address | None = None,
    ) -> None:
        self._app = create_app(client, tokenizer, config, model_name, max_model_len, self._engine_started)
        self._settings = config
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._listening = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = config.port
        super().__init__(
            uvicorn.Config(
                self._app,
                host=config.host,
                port=config.port,
                ws=WebSocketProtocol,
                ws_max_size=config.max_message_bytes,
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=5,
            )
        )

    @property
    def start_error(self) -> BaseException | None:
        """What kept the engine from starting; the server stops by itself then."""
        error: BaseException | None = self._app.state.server.start_error
        return error

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped.

        Raises:
            ConfigError: the address cannot be listened on.
            BaseException: whatever kept the engine from starting.
        """
        asyncio.run(self.serve(sockets or [bind(self._settings)]))
        if self.start_error is not None:
            raise self.start_error

    def stop(self) -> None:
        """Drain, then stop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, a second one stops at once."""
        if self._loop is None or self._app.state.server.draining:
            self.should_exit = self.force_exit = True
        else:
            self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.port = self.servers[0].sockets[0].getsockname()[1]
        self._listening.set()
        if self._on_listening is not None:
            self._on_listening(self._settings.host, self.port)

    def _begin_drain(self) -> None:
        if not self._app.state.server.draining:
            self._app.state.server.draining = True
            self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        await drain(self._app.state.server)
        self.should_exit = True

    def _engine_started(self, error: BaseException | None) -> None:
        if error is not None:
            log.error("the engine did not start: %s", type(error).__name__)
            self.should_exit = True
        elif self._on_ready is not None:
            self._tasks.append(asyncio.ensure_future(self._tell_ready(self._on_ready)))

    async def _tell_ready(self, tell: Address) -> None:
        await self._listening.wait()
        tell(self._settings.host, self.port)


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        raise ConfigError(f"port: cannot listen on {where}: {error.strerror}", param="port") from None
    return listener


def serve(
    client: EngineClient,
    tokenizer: ChatTokenizer,
    config: ServerConfig,
    model_name: str,
    max_model_len: int,
    on_listening: Address | None = None,
    on_ready: Address | None = None,
) -> None:
    """Serve until a signal: see Server."""
    Server(client, tokenizer, config, model_name, max_model_len, on_listening, on_ready).run()
