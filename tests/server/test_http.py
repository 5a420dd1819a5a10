"""Health, metrics, limits and vanished clients over plain HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.client import FakeClient
from tests.fakes.server import eventually, in_loop, running


async def open_request(server, method, path, body=b"", headers=()):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "Connection: close"]
    writer.write("\r\n".join([*head, *headers]).encode() + b"\r\n\r\n" + body)
    return reader, writer


async def request(server, method, path, body=b"", headers=()):
    """(status, headers, body) of one request."""
    reader, writer = await open_request(server, method, path, body, headers)
    raw = await reader.read()
    writer.close()
    head, _, payload = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), payload


def body(**values):
    return json.dumps({"input": "hi", **values}).encode()


@in_loop
async def test_trap_g3_liveness_and_readiness_are_separate():
    client = FakeClient()
    async with running(client) as server:
        assert (await request(server, "GET", "/health/ready"))[0] == 200
        client.die()
        assert (await request(server, "GET", "/health/live"))[0] == 200
        assert (await request(server, "GET", "/health/ready"))[0] == 503
        await client.start()
        assert (await request(server, "GET", "/health/ready"))[0] == 200


@in_loop
async def test_metrics_are_prometheus_text():
    client = FakeClient()
    client.counters = {'spec_decode_num_drafts_total{source="suffix"}': 3, "tokens_total": 7.5, "bad name": 1}
    async with running(client) as server:
        status, head, text = await request(server, "GET", "/metrics")
    lines = text.decode().splitlines()
    assert status == 200
    assert b"text/plain; version=0.0.4" in head
    assert "# TYPE specserve:spec_decode_num_drafts_total counter" in lines
    assert 'specserve:spec_decode_num_drafts_total{source="suffix"} 3' in lines
    assert "specserve:tokens_total 7.5" in lines
    assert "# TYPE specserve:num_requests_running gauge" in lines
    assert not any("bad name" in line for line in lines)


@in_loop
async def test_index_and_unknown_paths():
    async with running() as server:
        status, _, page = await request(server, "GET", "/")
        assert (status, json.loads(page)["links"]["websocket"]) == (200, "/v1/responses")
        status, _, page = await request(server, "GET", "/nope")
        assert (status, json.loads(page)["error"]["code"]) == (404, "not_found")
        status, _, page = await request(server, "GET", "/v1/chat/completions")
        assert (status, json.loads(page)["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.parametrize("chunked", [False, True])
@in_loop
async def test_trap_e6_a_large_body_is_refused(chunked):
    async with running(max_message_bytes=2048) as server:
        if chunked:
            big = b"1000\r\n" + b"x" * 4096 + b"\r\n0\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
            head = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            writer.write(head + big)
            raw = await reader.read()
            writer.close()
            status, page = int(raw.split()[1]), raw.partition(b"\r\n\r\n")[2]
        else:
            status, _, page = await request(server, "POST", "/v1/responses", b"x" * 3000)
        assert (status, json.loads(page)["error"]["code"]) == (413, "message_too_large")
        assert (await request(server, "POST", "/v1/responses", body()))[0] == 200


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"wobble": 1}, "wobble"),
        ({"stream_id": "a"}, "stream_id"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"background": True}, "background"),
        ({"seed": -1}, "seed"),
        ({"stream": "yes"}, "stream"),
    ],
)
@in_loop
async def test_bad_options_are_400s_that_name_the_field(values, param):
    async with running() as server:
        status, _, page = await request(server, "POST", "/v1/responses", body(**values))
    error = json.loads(page)["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_trap_d8_a_client_that_vanishes_is_aborted(stream):
    client = FakeClient()
    client.gate.clear()
    async with running(client) as server:
        _, writer = await open_request(server, "POST", "/v1/responses", body(stream=stream))
        await eventually(lambda: len(client.live) == 1)
        writer.transport.abort()
        await eventually(lambda: client.live == {})
        assert len(client.aborted) == 1
        assert server.state.active == 0


@in_loop
async def test_heartbeats_and_death_on_a_stream():
    client = FakeClient()
    client.gate.clear()
    async with running(client, heartbeat_seconds=0.02) as server:
        reader, writer = await open_request(server, "POST", "/v1/responses", body(stream=True))
        text = ""
        while text.count("event: response.in_progress") < 5:
            text += (await reader.readline()).decode()
        client.die()
        text += (await reader.read()).decode()
        writer.close()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "engine_died"


@in_loop
async def test_trap_g4_a_stop_ends_http_streams_typed():
    client = FakeClient()
    client.gate.clear()
    async with running(client, drain_seconds=0) as server:
        reader, writer = await open_request(server, "POST", "/v1/responses", body(stream=True))
        while b"response.in_progress" not in await reader.readline():
            pass
        server.server.stop()
        rest = (await reader.read()).decode()
        writer.close()
        await server.task
    assert rest.count("event: response.failed") == 1
    assert "shutting_down" in rest
    assert len(client.aborted) == 1


@in_loop
async def test_a_hostile_page_cannot_post():
    async with running() as server:
        status, _, _ = await request(server, "POST", "/v1/responses", body(), ["Origin: https://hostile.example"])
    assert status == 403
