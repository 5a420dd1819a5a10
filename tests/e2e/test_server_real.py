"""The server with the demo model over real sockets: interleaving, cancel, vanished clients, engine death."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import websockets
from openai import OpenAI

from specserve.cli.wire import Socket
from specserve.core.errors import SpecserveError
from specserve.kernels.cpu.native import library
from tests.fakes.real_server import Server, running_server

LONG = {"input": "Count from one to one thousand in words.", "max_output_tokens": 2000, "min_tokens": 2000}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--kv-memory", "512MiB") as running:
        yield running


def test_what_runs_is_told_at_the_start(server: Server) -> None:
    """Not what was asked for: "auto" is the file's own blocks, where the kernels are there."""
    weights = "bfloat16" if library() is None else "q4_1+q8_0"
    assert f"(demo, weights {weights}, activations and KV bfloat16, numerics invariant," in server.line


def gauge(server: Server, name: str) -> float:
    """The value of one metric without labels."""
    with urllib.request.urlopen(f"{server.http}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith((f"specserve:{name} ", f"specserve:{name}{{")):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


async def until_idle(server: Server) -> None:
    """Wait until nothing runs and no KV block is held; fails by the test's own timeout."""
    while await asyncio.to_thread(gauge, server, "num_requests_running") > 0:
        pass  # each look is a request of its own
    assert await asyncio.to_thread(gauge, server, "kv_blocks_used") == 0


async def collect(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event async for event in events]


def test_two_responses_interleave(server: Server) -> None:
    async def run() -> None:
        async with Socket(server.url) as socket:
            order: list[str] = []

            async def one(name: str) -> list[dict[str, Any]]:
                got = []
                async for event in socket.stream({"input": f"Tell me about {name}.", "max_output_tokens": 40}):
                    order.append(name)
                    got.append(event)
                return got

            for events in await asyncio.gather(one("rain"), one("snow")):
                assert [e["sequence_number"] for e in events] == list(range(len(events)))
                assert len({e["stream_id"] for e in events}) == len({e["response_id"] for e in events}) == 1
                assert events[0]["type"] == "response.created"
                text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
                done = next(e for e in events if e["type"] == "response.output_text.done")
                assert done["text"] == text
            assert sum(a != b for a, b in itertools.pairwise(order)) > 4, "they interleave"
        await until_idle(server)

    asyncio.run(run())


def test_trap_e19_cancel_by_id_frees_blocks(server: Server) -> None:
    async def run() -> None:
        async with Socket(server.url) as socket:
            deltas = 0
            async for event in socket.stream(LONG):
                if event["type"] == "response.output_text.delta":
                    deltas += 1
                    if deltas == 3:
                        await socket.cancel(event["response_id"])
            assert event["type"] == "response.cancelled"
            assert 3 <= event["response"]["usage"]["output_tokens"] < 2000
            await until_idle(server)
            after = await collect(socket.stream({"input": "Say hi.", "max_output_tokens": 4}))
            assert after[-1]["type"] in ("response.completed", "response.incomplete")

    asyncio.run(run())


def test_trap_d8_vanished_client(server: Server) -> None:
    async def run() -> None:
        connection = await websockets.connect(server.url)
        await connection.send(json.dumps({"type": "response.create", **LONG}))
        async for frame in connection:
            if json.loads(frame)["type"] == "response.output_text.delta":
                break
        while await asyncio.to_thread(gauge, server, "num_requests_running") == 0:
            pass  # figures may be those of before the request
        connection.transport.abort()
        await until_idle(server)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("frame", "param"),
    [
        ("{not json", None),
        (json.dumps({"type": "response.fly"}), "type"),
        (json.dumps({"type": "response.create", "input": "x", "frobnicate": 1}), "frobnicate"),
        (json.dumps({"type": "response.create", "input": "x", "temperature": "hot"}), "temperature"),
    ],
)
def test_bad_frames_give_one_error_and_the_socket_lives(server: Server, frame: str, param: str | None) -> None:
    async def run() -> None:
        async with websockets.connect(server.url) as connection:
            await connection.send(frame)
            await connection.send(json.dumps({"type": "response.create", "input": "Hi", "max_output_tokens": 2}))
            errors, last = [], None
            async for text in connection:
                event = json.loads(text)
                if event["type"] == "error":
                    errors.append(event)
                if event["type"] in ("response.completed", "response.incomplete"):
                    last = event
                    break
            assert last is not None
            assert len(errors) == 1
            assert errors[0]["error"]["message"]
            if param is not None:
                assert errors[0]["error"]["param"] == param

    asyncio.run(run())


def test_oversized_frame_closes_with_1009(server: Server) -> None:
    async def run() -> int | None:
        async with websockets.connect(server.url) as connection:
            await connection.send(json.dumps({"type": "response.create", "input": "x" * (5 * 2**20)}))
            with contextlib.suppress(websockets.ConnectionClosed):
                async for _ in connection:
                    pass
            return connection.close_code

    assert asyncio.run(run()) == 1009


def test_c27_cut_json_is_incomplete(server: Server) -> None:
    schema = {"type": "array", "items": {"type": "string", "minLength": 40}, "minItems": 30}
    job = {
        "input": "List things.",
        "max_output_tokens": 12,
        "text": {"format": {"type": "json_schema", "name": "things", "schema": schema}},
    }

    async def run() -> None:
        async with Socket(server.url) as socket:
            events = await collect(socket.stream(job))
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"]["reason"] == "max_output_tokens"

    asyncio.run(run())


def test_official_client_over_http(server: Server) -> None:
    with OpenAI(base_url=f"{server.http}/v1", api_key="none") as client:
        answer = client.responses.create(model="demo", input="Say hello.", max_output_tokens=8)
        assert answer.output_text
        chat = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
        )
        assert chat.choices[0].message.content


def test_trap_g3_killed_engine_gives_one_failure_each_and_comes_back(server: Server) -> None:
    async def run() -> None:
        async with Socket(server.url) as socket:
            started = [asyncio.Event() for _ in range(4)]

            async def one(i: int) -> list[str]:
                types = []
                try:
                    async for event in socket.stream({**LONG, "seed": i}):
                        types.append(event["type"])
                        if event["type"] == "response.output_text.delta":
                            started[i].set()
                except SpecserveError as error:
                    types.append(f"failed:{error.code}")
                return types

            tasks = [asyncio.create_task(one(i)) for i in range(4)]
            await asyncio.gather(*(event.wait() for event in started))
            os.kill(server.engine_pid(), signal.SIGKILL)
            for types in await asyncio.gather(*tasks):
                assert [t for t in types if t.startswith("failed")] == ["failed:engine_died"]
                assert types[-1] == "failed:engine_died"
            after = await collect(socket.stream({"input": "Say hi.", "max_output_tokens": 4}))
            assert after[-1]["type"] in ("response.completed", "response.incomplete")
        await until_idle(server)

    asyncio.run(run())
