"""Liveness, readiness and the engine's stall, over HTTP and beside a live WebSocket."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from specserve.engine.client import AsyncEngineClient
from specserve.engine.thread import EngineThread
from specserve.engine.watchdog import Watchdog
from tests.fakes.client import FakeClient
from tests.fakes.engines import make_rig
from tests.fakes.server import TERMINAL, eventually, in_loop, receive, running, send, until

REASON = "12 requests wait and no step has run for 31 s"


class StallingClient(FakeClient):
    """Stalled while it has a reason."""

    stall_reason: str | None = None


async def get(server, path):
    """(status, headers, body)"""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


async def health(server, kind="ready"):
    """(status, JSON)"""
    status, _, body = await get(server, f"/health/{kind}")
    return status, json.loads(body)


async def metric(server, name):
    _, _, text = await get(server, "/metrics")
    assert f"# TYPE {name} gauge" in text.decode().splitlines()
    (value,) = [line.split()[1] for line in text.decode().splitlines() if line.startswith(name + " ")]
    return float(value)


@in_loop
async def test_trap_d2_a_stalled_engine_is_live_and_not_ready():
    client = StallingClient()
    client.counters = {"engine_stalled": 0}  # older than the verdict
    async with running(client) as server:
        assert await health(server) == (200, {"status": "ready"})
        assert await metric(server, "specserve:engine_stalled") == 0
        client.stall_reason = REASON
        assert await health(server) == (503, {"status": "stalled", "reason": REASON})
        assert b"retry-after" in (await get(server, "/health/ready"))[1]
        assert await health(server, "live") == (200, {"status": "live"})
        assert await metric(server, "specserve:engine_stalled") == 1
        client.stall_reason = None
        assert await health(server) == (200, {"status": "ready"})
        assert await metric(server, "specserve:engine_stalled") == 0


@in_loop
async def test_an_engine_that_is_down_or_a_server_that_stops_is_told_before_a_stall():
    client = StallingClient()
    client.stall_reason = REASON
    async with running(client) as server:
        client.die()
        assert await health(server) == (503, {"status": "starting"})
        server.state.draining = True
        assert await health(server) == (503, {"status": "stopping"})
        server.state.draining = False  # so that the end drains


@in_loop
async def test_a_client_that_knows_no_stalls_is_never_stalled():
    class Plain(FakeClient):
        @property
        def stall_reason(self):
            raise AttributeError

    async with running(Plain()) as server:
        assert await health(server) == (200, {"status": "ready"})
        assert await metric(server, "specserve:engine_stalled") == 0


class Hanging:
    """A real engine in a thread, which hangs in its first step until `gate` is set; its clock moves when told."""

    def __init__(self):
        self.now = 0.0
        self.gate = threading.Event()
        self.inside = threading.Event()
        rig = make_rig()
        rig.engine.watchdog = Watchdog(lambda: self.now)
        rig.executor.before_forward = self._hang
        self.client = AsyncEngineClient(EngineThread(lambda: rig.engine))

    def _hang(self, plan):
        self.inside.set()
        assert self.gate.wait(50)


@pytest.fixture
def hanging():
    engine = Hanging()
    yield engine
    engine.gate.set()


@in_loop
async def test_trap_d2_a_socket_lives_on_beside_an_engine_that_hangs(hanging):
    async with running(hanging.client, heartbeat_seconds=0.02) as server, server.connect() as socket:
        try:
            await until(socket, "session.created")
            await send(socket, type="response.create", stream_id="a", input="hi", max_output_tokens=50)
            await eventually(hanging.inside.is_set)
            assert (await health(server))[0] == 200
            hanging.now += 31
            reason = "1 request waits and one step has run for 31 s"
            assert await health(server) == (503, {"status": "stalled", "reason": reason})

            await send(socket, type="response.cancel", stream_id="a")
            await send(socket, type="response.create", stream_id="b", input="ho", max_output_tokens=2)
            await send(socket, type="nonsense")
            events = await until(socket, "error")
            assert not any(event["type"] in TERMINAL for event in events)
            assert not hanging.gate.is_set()
            for _ in range(6):  # of both, what opens them and then heartbeats
                assert (await receive(socket))["type"] not in TERMINAL
            await eventually(lambda: server.state.client.stall_reason.startswith("2 requests wait"))

            hanging.gate.set()
            ends = [(await until(socket, *TERMINAL))[-1] for _ in "ab"]
            assert {end["stream_id"]: end["type"] for end in ends} == {
                "a": "response.cancelled",
                "b": "response.incomplete",
            }
            assert await health(server) == (200, {"status": "ready"})
        finally:
            hanging.gate.set()


@in_loop
async def test_trap_d2_a_socket_that_leaves_a_hanging_engine_is_gone_at_once(hanging):
    async with running(hanging.client) as server:
        try:
            async with server.connect() as socket:
                await send(socket, type="response.create", input="hi", max_output_tokens=50)
                await eventually(hanging.inside.is_set)
                hanging.now += 31
            await eventually(lambda: not server.state.connections)
            assert not hanging.gate.is_set()
            assert (await health(server))[1]["status"] == "stalled"
            hanging.gate.set()
            await eventually(lambda: server.state.client.stall_reason is None)
        finally:
            hanging.gate.set()
