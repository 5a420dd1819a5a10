"""The HTTP routes: generation, models, health, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from specserve.core.errors import InvalidRequestError, SpecserveError
from specserve.core.messages import Event
from specserve.server import chat, events, metrics
from specserve.server.auth import authenticate
from specserve.server.codec import dumps, loads
from specserve.server.generate import GenerationResponse, View
from specserve.server.options import parse_responses
from specserve.server.prompt import tokenize
from specserve.server.request import CreateRequest
from specserve.server.response import ResponseStream
from specserve.server.state import ServerState, internal

Handler = Callable[[Request, ServerState], Awaitable[Any]]
LINKS = {
    "websocket": "/v1/responses",
    "responses": "/v1/responses",
    "chat_completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "models": "/v1/models",
    "live": "/health/live",
    "ready": "/health/ready",
    "metrics": "/metrics",
}


class TooLargeError(InvalidRequestError):
    """The body is over the published limit (413)."""

    code = "message_too_large"
    status = 413


class ResponsesView:
    """The Responses API's events, each under its own event name."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream

    def open(self) -> list[bytes]:
        return _frames(self._stream.open())

    def feed(self, event: Event) -> list[bytes]:
        return _frames(self._stream.feed(event))

    def heartbeat(self) -> list[bytes]:
        return _frames(self._stream.heartbeat())

    def close(self) -> list[bytes]:
        return []

    def result(self) -> dict[str, Any]:
        return self._stream.object


def endpoint(handler: Handler) -> Callable[[Request], Awaitable[Any]]:
    """Every error of a route in one form; nothing of an unexpected one gets out."""

    @wraps(handler)
    async def route(request: Request) -> Any:
        try:
            return await handler(request, request.app.state.server)
        except SpecserveError as error:
            return json_response({"error": events.error_of(error)}, error.status)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            return json_response({"error": events.error_of(internal("request", error))}, 500)

    return route


def json_response(value: Mapping[str, Any], status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(dumps(value), status, media_type="application/json", headers=headers)


async def index(request: Request, state: ServerState) -> Response:
    return json_response({"name": "specserve", "model": state.model, "links": LINKS})


async def live(request: Request, state: ServerState) -> Response:
    """The server's process answers; says nothing about the engine."""
    return json_response({"status": "live"})


async def ready(request: Request, state: ServerState) -> Response:
    """200 while requests are served: the engine runs and advances, and the server does not stop."""
    if state.draining:
        return json_response({"status": "stopping"}, 503)
    if not state.client.ready:
        return json_response({"status": "starting"}, 503)
    reason = state.stall_reason
    if reason is not None:
        return json_response({"status": "stalled", "reason": reason}, 503)
    return json_response({"status": "ready"})


async def show_metrics(request: Request, state: ServerState) -> Response:
    server = {
        "connections": float(len(state.connections)),
        "active_responses": float(state.active),
        "engine_stalled": float(state.stall_reason is not None),
    }
    text = metrics.render(await state.stats(), server)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def models(request: Request, state: ServerState) -> Response:
    authenticate(state.config, request.headers)
    return json_response({"object": "list", "data": [_model(state)]})


async def model(request: Request, state: ServerState) -> Response:
    authenticate(state.config, request.headers)
    if request.path_params["name"] != state.model:
        error = InvalidRequestError(f"this server serves {state.model} only", param="model", code="model_not_found")
        error.status = 404
        raise error
    return json_response(_model(state))


async def responses(request: Request, state: ServerState) -> GenerationResponse:
    def parse(values: Mapping[str, Any]) -> CreateRequest:
        return parse_responses(values, state.limits, state.model, socket=False)

    def view(name: str, options: CreateRequest, prompt_tokens: int) -> View:
        stream = ResponseStream(name, options, model=state.model, created_at=float(int(time.time())), stream_id=name)
        stream.prompt_tokens = prompt_tokens
        return ResponsesView(stream)

    return await _generate(request, state, "resp", parse, view)


async def chat_completions(request: Request, state: ServerState) -> GenerationResponse:
    def parse(values: Mapping[str, Any]) -> CreateRequest:
        return chat.parse_chat(values, state.limits, state.model)

    def view(name: str, options: CreateRequest, prompt_tokens: int) -> View:
        return chat.ChatView(name, options, state.model, int(time.time()))

    return await _generate(request, state, "chatcmpl", parse, view)


async def completions(request: Request, state: ServerState) -> GenerationResponse:
    def parse(values: Mapping[str, Any]) -> CreateRequest:
        return chat.parse_completion(values, state.limits, state.model)

    def view(name: str, options: CreateRequest, prompt_tokens: int) -> View:
        return chat.CompletionView(name, options, state.model, int(time.time()))

    return await _generate(request, state, "cmpl", parse, view)


async def _generate(
    request: Request,
    state: ServerState,
    prefix: str,
    parse: Callable[[Mapping[str, Any]], CreateRequest],
    view: Callable[[str, CreateRequest, int], View],
) -> GenerationResponse:
    identity = authenticate(state.config, request.headers)
    state.admit()
    options = parse(loads(await read_body(request, state.limits.message_bytes), "the body"))
    ids = await tokenize(options.prompt, state.tokenizer, state.threads)
    name = events.new_id(prefix)
    command = options.command(name, ids, identity.namespace, state.limits.model_len)
    return GenerationResponse(state, options, command, view(name, options, len(ids)))


async def read_body(request: Request, most: int) -> bytes:
    """The body, of at most `most` bytes whatever its headers say."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > most:
        raise TooLargeError(f"the body has {length} bytes; the limit is {most}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise TooLargeError(f"the body has more than {most} bytes, the limit")
    return bytes(body)


async def not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    code = {405: "method_not_allowed"}.get(status, "not_found")
    message = "this path does not take this method" if status == 405 else "no such path"
    return json_response({"error": events.error_object(code, message, None, status)}, status)


def _frames(wire: list[dict[str, Any]]) -> list[bytes]:
    return [b"event: " + event["type"].encode() + b"\ndata: " + dumps(event) + b"\n\n" for event in wire]


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model,
        "object": "model",
        "created": 0,
        "owned_by": "specserve",
        "max_model_len": state.limits.model_len,
    }
