"""Real sockets: uvicorn, the websockets client, a fake engine."""

from __future__ import annotations

import asyncio

import pytest
from websockets.exceptions import InvalidStatus

from specserve.server.auth import Identity
from specserve.server.ws import SocketConnection
from tests.fakes.client import FakeClient
from tests.fakes.server import TERMINAL, close_code, eventually, in_loop, receive, running, send, until


def by_response(events):
    groups = {}
    for event in events:
        groups.setdefault(event["response_id"], []).append(event)
    groups.pop(None, None)
    return groups


@in_loop
async def test_one_response_streams_in_order_with_complete_usage():
    async with running() as server, server.connect() as socket:
        first = await receive(socket)
        assert first["type"] == "session.created"
        assert first["session"]["limits"]["max_responses"] == 64
        assert (first["session"]["limits"]["max_n"], first["session"]["limits"]["max_beam_width"]) == (64, 16)
        await send(socket, type="response.create", input="hi", max_output_tokens=5, seed=9, report_speculation=True)
        events = await until(socket, *TERMINAL)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["response.created", "response.queued", "response.in_progress", "response.in_progress"]
    assert kinds[4:6] == ["response.output_item.added", "response.content_part.added"]
    assert kinds[6:11] == ["response.output_text.delta"] * 5
    assert kinds[11:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["event_id"] for event in events}) == len(events)
    assert len({(event["response_id"], event["stream_id"]) for event in events}) == 1
    final = events[-1]["response"]
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["content"][0]["text"] == "<user"
    assert final["usage"]["speculation"]["by_source"] == {"suffix": {"drafted": 4, "accepted": 3, "rejected": 1}}
    assert (final["seed"], final["numerics"]) == (9, "invariant")


@in_loop
async def test_trap_e13_two_creates_at_once_interleave_by_stream_id():
    client = FakeClient()
    client.gate.clear()
    async with running(client) as server, server.connect() as socket:
        await send(socket, type="response.create", stream_id="a", input="one")
        await send(socket, type="response.create", stream_id="b", response={"input": "two"})
        await send(socket, type="response.create", stream_id="c", input="x", temperature="hot")
        events = []
        while sum(event["type"] == "response.in_progress" for event in events) < 4:
            events.append(await receive(socket))
        client.gate.set()
        while sum(event["type"] in TERMINAL for event in events) < 2:
            events.append(await receive(socket))
    deltas = [event["stream_id"] for event in events if event["type"].endswith("text.delta")]
    assert deltas.index("a") < deltas.index("b") < len(deltas) - deltas[::-1].index("a") - 1, "they interleave"
    for group in by_response(events).values():
        assert [event["sequence_number"] for event in group] == list(range(len(group)))
        assert len({event["stream_id"] for event in group}) == 1
    errors = [event for event in events if event["type"] == "error"]
    assert [(e["stream_id"], e["error"]["param"]) for e in errors] == [("c", "temperature")]


@in_loop
async def test_trap_e19_cancel_by_id_is_acknowledged_with_usage():
    client = FakeClient()
    client.gate.clear()
    async with running(client) as server, server.connect() as socket:
        await send(socket, type="response.create", stream_id="a", input="one")
        await send(socket, type="response.create", stream_id="b", input="two")
        seen = []
        while len(client.live) < 2 or sum(e["type"] == "response.in_progress" for e in seen) < 4:
            seen.append(await receive(socket))
        target = next(e["response_id"] for e in seen if e["stream_id"] == "a")
        await send(socket, type="response.cancel", response_id=target)
        cancelled = (await until(socket, *TERMINAL))[-1]
        assert (cancelled["type"], cancelled["response_id"]) == ("response.cancelled", target)
        assert cancelled["response"]["usage"]["input_tokens"] > 0
        await send(socket, type="response.cancel", stream_id="b")
        assert (await until(socket, *TERMINAL))[-1]["stream_id"] == "b"
        await send(socket, type="response.cancel", response_id=target)
        assert (await receive(socket))["error"]["code"] == "response_not_found"
    assert client.live == {}


@in_loop
async def test_trap_d9_cancel_right_behind_the_create():
    client = FakeClient()
    client.gate.clear()
    async with running(client) as server, server.connect() as socket:
        await send(socket, type="response.create", stream_id="a", input="one")
        await send(socket, type="response.cancel", stream_id="a")
        events = await until(socket, *TERMINAL)
        assert events[1]["type"] == "response.created"
        assert events[-1]["type"] == "response.cancelled"
        await send(socket, type="response.create", stream_id="a", input="again")
        client.gate.set()
        assert (await until(socket, *TERMINAL))[-1]["type"] == "response.completed"
    assert client.live == {}


@pytest.mark.parametrize("how", ["close", "reset"])
@in_loop
async def test_trap_d8_e7_a_vanished_client_aborts_only_its_own_requests(how):
    client = FakeClient()
    client.gate.clear()
    async with running(client) as server, server.connect() as other:
        await send(other, type="response.create", input="stays")
        await until(other, "response.in_progress")
        async with server.connect() as socket:
            await send(socket, type="response.create", stream_id="a", input="one")
            await send(socket, type="response.create", stream_id="b", input="two")
            while len(client.live) < 3:
                await receive(socket)
            gone = {command.request_id for command in client.commands[1:]}
            if how == "reset":
                socket.transport.write(b"\x81\xff\x00")  # the start of a frame
                socket.transport.abort()
        await eventually(lambda: len(client.closed_streams) == 2)
        assert set(client.aborted) == gone
        assert len(client.live) == 1
        client.gate.set()
        assert (await until(other, *TERMINAL))[-1]["type"] == "response.completed"


@in_loop
async def test_frames_at_fault_give_one_error_each_and_the_socket_lives_on():
    faults = {
        "{not json": None,
        "[1]": None,
        "[" * 900 + "]" * 900: None,
        '{"type":"response.create","input":"x","temperature":NaN}': None,
        '{"type":"nonsense"}': "type",
        '{"a":1}': "type",
        '{"type":"response.create","input":"x","wobble":1}': "wobble",
        '{"type":"response.create","input":"x","max_output_tokens":"many"}': "max_output_tokens",
        '{"type":"response.create","input":3}': "input",
        '{"type":"response.create"}': "input",
        '{"type":"response.create","response":[]}': "response",
        '{"type":"response.cancel"}': "response_id",
        '{"type":"response.resume","response_id":"x"}': "type",
    }
    async with running() as server, server.connect() as socket:
        await receive(socket)
        for frame, param in faults.items():
            await socket.send(frame)
            event = await receive(socket)
            assert (event["type"], event["error"]["param"]) == ("error", param), frame
            assert event["error"]["message"]
        await socket.send(b"\x00\x01")
        assert (await receive(socket))["type"] == "error"
        await send(socket, type="response.create", input="still here")
        events = await until(socket, *TERMINAL)
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"


@in_loop
async def test_trap_e6_an_oversized_frame_closes_with_1009_and_others_live():
    async with running(max_message_bytes=2048) as server, server.connect() as other:
        async with server.connect() as socket:
            limits = (await receive(socket))["session"]["limits"]
            assert limits["max_message_bytes"] == 2048
            await send(socket, type="response.create", input="a" * 1900, max_output_tokens=1)
            event = await receive(socket)
            assert event["error"]["code"] == "context_length_exceeded"
            assert await close_code(socket, "x" * 3_000_000) == 1009
        await send(other, type="response.create", input="hi")
        assert (await until(other, *TERMINAL))[-1]["type"] == "response.completed"


@in_loop
async def test_bad_utf8_closes_with_1007():
    async with running() as server, server.connect() as socket:
        await receive(socket)
        assert await close_code(socket, b"\xff\xfe") == 1007


@pytest.mark.parametrize("choices", [1, 3])
@in_loop
async def test_trap_e5_a_client_that_stops_reading_is_closed_and_aborted(choices):
    client = FakeClient(script=flood)
    limits = {"output_buffer_bytes": 64 * 1024, "slow_client_seconds": 0.2}
    async with running(client, **limits) as server, server.connect(max_queue=1) as socket:
        for i in range(8):
            await send(socket, type="response.create", stream_id=str(i), input="go", n=choices)
        largest = 0

        def all_ended():
            nonlocal largest
            largest = max([largest, *(c._outbox.size for c in server.state.connections)])
            return len(client.closed_streams) == 8

        await eventually(all_ended)
        assert 32 * 1024 <= largest < 128 * 1024, "the buffer fills and is bounded"
        assert len(client.aborted) == 8
        assert await close_code(socket) == 1013


def flood(command):
    from specserve.core.messages import DeltaEvent, StartedEvent

    yield StartedEvent(command.request_id, 1, len(command.prompt_token_ids), 0)
    while True:
        for index in range(command.params.n):
            yield DeltaEvent(command.request_id, (65,), "A" * 4000, index=index)


@in_loop
async def test_trap_e18_heartbeats_fill_the_silence():
    client = FakeClient()
    client.gate.clear()
    async with running(client, heartbeat_seconds=0.02) as server, server.connect() as socket:
        await send(socket, type="response.create", input="one")
        beats = []
        while len(beats) < 5:
            event = await receive(socket)
            beats += [event] if event["type"] == "response.in_progress" else []
        assert beats[-1]["prefill"] == {"computed": 20, "total": 20}
        await (await socket.ping())
        client.gate.set()
        events = await until(socket, *TERMINAL)
        assert events[-1]["type"] == "response.completed"


@in_loop
async def test_trap_e11_engine_death_fails_each_response_once_and_the_socket_serves_again():
    client = FakeClient()
    client.gate.clear()
    async with running(client) as server, server.connect() as socket:
        await send(socket, type="response.create", stream_id="a", input="one")
        await send(socket, type="response.create", stream_id="b", input="two")
        while len(client.live) < 2:
            await receive(socket)
        client.die()
        ends = {}
        while len(ends) < 2:
            event = await receive(socket)
            if event["type"] in TERMINAL:
                ends[event["stream_id"]] = (event["type"], event["response"]["error"]["code"])
        assert ends == {"a": ("response.failed", "engine_died"), "b": ("response.failed", "engine_died")}
        await send(socket, type="response.create", stream_id="a", input="again")
        await until(socket, "response.queued")
        client.gate.set()
        await client.start()
        events = await until(socket, *TERMINAL)
        assert [event["type"] for event in events if event["type"] in TERMINAL] == ["response.completed"]


@in_loop
async def test_trap_g4_a_stop_drains_then_ends_with_typed_errors():
    client = FakeClient()
    client.gate.clear()
    async with running(client, drain_seconds=0.3) as server, server.connect() as socket:
        await send(socket, type="response.create", stream_id="a", input="one")
        await until(socket, "response.in_progress")
        server.server.stop()
        await eventually(lambda: server.state.draining)
        with pytest.raises(InvalidStatus) as refused:
            await server.connect()
        assert refused.value.response.status_code == 503
        await send(socket, type="response.create", stream_id="b", input="late")
        error = (await until(socket, "error"))[-1]
        assert (error["stream_id"], error["error"]["code"]) == ("b", "shutting_down")
        failed = (await until(socket, *TERMINAL))[-1]
        assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "shutting_down")
        assert await close_code(socket) == 1001
        await server.task


@in_loop
async def test_a_stop_lets_a_live_response_finish():
    client = FakeClient()
    client.gate.clear()
    async with running(client, drain_seconds=30) as server, server.connect() as socket:
        await send(socket, type="response.create", input="one")
        await until(socket, "response.in_progress")
        server.server.stop()
        await eventually(lambda: server.state.draining)
        client.gate.set()
        assert (await until(socket, *TERMINAL))[-1]["type"] == "response.completed"
        await server.task


@in_loop
async def test_trap_e6_the_close_frame_arrives_after_the_whole_oversized_frame_was_sent():
    """A client that reads only once it has sent everything must not find a TCP reset instead."""
    async with running(max_message_bytes=2048) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
        key = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        writer.write(
            b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + key + b"\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        size = 8 * 2**20
        writer.write(b"\x81\xff" + size.to_bytes(8, "big") + b"\0\0\0\0")
        for _ in range(size // 65536):
            writer.write(b"a" * 65536)
            await writer.drain()
        rest = await reader.read()
        writer.close()
    assert b"session.created" in rest
    assert (1009).to_bytes(2, "big") in rest[-64:]


@in_loop
async def test_trap_d9_a_cancel_that_overtakes_its_own_submit():
    async with running() as server:
        connection = SocketConnection(None, server.state, Identity())
        session = connection._session
        (job,) = session.receive_text('{"type": "response.create", "input": "hi", "stream_id": "a"}')
        connection._perform(session.prepared(job.response_id, (1, 2)))
        connection._perform(session.receive_text('{"type": "response.cancel", "stream_id": "a"}'))
        await asyncio.gather(*connection._tasks)
        assert server.client.commands == []
        assert session.active == 0
        assert b'"response.cancelled"' in connection._outbox._frames[-1]
