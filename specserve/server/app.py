"""The ASGI application: routes, the engine client's life, and the drain."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from specserve.core.config import ServerConfig
from specserve.server import http
from specserve.server.limits import Limits
from specserve.server.prompt import ChatTokenizer
from specserve.server.state import EngineClient, ServerState
from specserve.server.ws import serve_socket

log = logging.getLogger("specserve.server")


def create_app(
    client: EngineClient,
    tokenizer: ChatTokenizer,
    config: ServerConfig,
    model_name: str,
    max_model_len: int,
    on_start: Callable[[BaseException | None], None] | None = None,
) -> Starlette:
    """The application. It starts `client` when it starts (answering /health/live meanwhile) and closes it at its end.

    Args:
        max_model_len: tokens of prompt and output together.
        on_start: called once with None when the engine is ready, or with what kept it from starting.
    """
    limits = Limits.of(config, max_model_len, tokenizer.vocab_size)
    state = ServerState(client, tokenizer, config, limits, model_name)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        start = asyncio.create_task(_start(state, on_start))
        try:
            yield
        finally:
            start.cancel()
            with suppress(asyncio.CancelledError):
                await start
            await _call(client, "close")
            state.threads.shutdown(wait=False, cancel_futures=True)

    async def socket(websocket: WebSocket) -> None:
        await serve_socket(websocket, state)

    middleware = []
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["*"], allow_headers=["*"]
            )
        )
    app = Starlette(
        routes=[WebSocketRoute("/v1/responses", socket), *_routes()],
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={HTTPException: http.not_found},
    )
    app.state.server = state
    return app


async def drain(state: ServerState) -> None:
    """Stop admitting, let live responses run on until the deadline, end the rest with typed errors, close sockets."""
    state.draining = True
    for connection in list(state.connections):
        connection.stop_admitting()
    deadline = asyncio.get_running_loop().time() + state.config.drain_seconds
    # Polling is for the few moments of a stop; nothing else has to know of the drain then.
    while state.active and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    if state.active:
        log.warning("stopping with %d responses not ended", state.active)
    await asyncio.gather(*(connection.shut_down() for connection in list(state.connections)))


def _routes() -> list[Route]:
    post, get = ["POST"], ["GET"]
    return [
        Route("/", http.endpoint(http.index), methods=get),
        Route("/health/live", http.endpoint(http.live), methods=get),
        Route("/health/ready", http.endpoint(http.ready), methods=get),
        Route("/metrics", http.endpoint(http.show_metrics), methods=get),
        Route("/v1/models", http.endpoint(http.models), methods=get),
        Route("/v1/models/{name:path}", http.endpoint(http.model), methods=get),
        Route("/v1/responses", http.endpoint(http.responses), methods=post),
        Route("/v1/chat/completions", http.endpoint(http.chat_completions), methods=post),
        Route("/v1/completions", http.endpoint(http.completions), methods=post),
    ]


async def _start(state: ServerState, on_start: Callable[[BaseException | None], None] | None) -> None:
    try:
        await _call(state.client, "start")
    except Exception as error:
        state.start_error = error
    if on_start is not None:
        on_start(state.start_error)


async def _call(target: Any, name: str) -> None:
    method = getattr(target, name, None)
    result = method() if method is not None else None
    if inspect.isawaitable(result):
        await result
