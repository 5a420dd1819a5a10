"""Keys and origins, refused before the upgrade; what is logged."""

from __future__ import annotations

import logging

import pytest
from websockets.exceptions import InvalidStatus

from specserve.core.config import ServerConfig
from specserve.server.auth import AuthenticationError, OriginError, authenticate, check_origin
from tests.fakes.client import FakeClient
from tests.fakes.server import TERMINAL, in_loop, receive, running, send, until

KEYS = {"api_keys": ("sk-one", "sk-two")}


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Basic sk-one"}])
@in_loop
async def test_trap_e8_no_key_or_a_wrong_one_is_refused_before_the_upgrade(headers):
    async with running(**KEYS) as server:
        with pytest.raises(InvalidStatus) as caught:
            await server.connect(additional_headers=headers)
        assert caught.value.response.status_code == 401
        assert b"sk-" not in caught.value.response.body
        assert server.state.connections == set()


@in_loop
async def test_trap_e9_the_browsers_pair_of_subprotocols(caplog):
    caplog.set_level(logging.DEBUG)
    key = "openai-insecure-api-key.sk-two"
    async with running(**KEYS) as server:
        caplog.set_level(logging.DEBUG, "uvicorn.error")
        async with server.connect(subprotocols=["realtime", key]) as socket:
            assert socket.subprotocol == "realtime"
            await receive(socket)
        with pytest.raises(InvalidStatus):
            await server.connect(subprotocols=["realtime", "openai-insecure-api-key.sk-no"])
    own = [record for record in caplog.records if not record.name.startswith("websockets.client")]
    assert not any("sk-" in record.getMessage() for record in own)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("http://127.0.0.1:{port}", True),
        ("https://listed.example", True),
        ("https://hostile.example", False),
        ("http://127.0.0.1:1", False),
        ("null", False),
    ],
)
@in_loop
async def test_trap_e10_origins(origin, allowed):
    async with running(allowed_origins=("https://listed.example",)) as server:
        headers = {"Origin": origin.format(port=server.server.port)} if origin else {}
        if allowed:
            async with server.connect(additional_headers=headers) as socket:
                await receive(socket)
        else:
            with pytest.raises(InvalidStatus) as caught:
                await server.connect(additional_headers=headers)
            assert caught.value.response.status_code == 403


def test_trap_e10_a_name_that_resolves_to_the_loopback_is_no_local_origin():
    local = ServerConfig(host="127.0.0.1")
    with pytest.raises(OriginError):
        check_origin(local, "http://hostile.example:8000", "hostile.example:8000")
    check_origin(local, "http://localhost:8000", "localhost:8000")
    check_origin(ServerConfig(host="0.0.0.0"), "http://box.example:8000", "box.example:8000")
    check_origin(ServerConfig(allowed_origins=("*",)), "http://any.example", "x")


def test_trap_d15_the_namespace_comes_from_the_authenticated_key():
    config = ServerConfig(**KEYS)
    one, two = (authenticate(config, {"authorization": f"Bearer {key}"}).namespace for key in config.api_keys)
    assert one != two
    assert one == authenticate(config, {}, ["realtime", "openai-insecure-api-key.sk-one"]).namespace
    assert "sk-one" not in one
    assert authenticate(ServerConfig(), {"authorization": "Bearer anything"}).namespace == ""
    with pytest.raises(AuthenticationError):
        authenticate(config, {"authorization": "Bearer "})


@in_loop
async def test_trap_d15_the_namespace_reaches_the_engine():
    client = FakeClient()
    async with running(client, **KEYS) as server:
        for key in server.state.config.api_keys:
            async with server.connect(additional_headers={"Authorization": f"Bearer {key}"}) as socket:
                await send(socket, type="response.create", input="same")
                await until(socket, *TERMINAL)
    first, second = client.commands
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.namespace
    assert second.namespace
    assert first.namespace != second.namespace


class Faulty:
    """A tokenizer with a bug whose words quote the prompt."""

    vocab_size = 300

    def encode_chat(self, messages):
        raise RuntimeError(f"cannot encode {messages}")


@in_loop
async def test_trap_g5_logs_have_no_content(caplog, capfd):
    caplog.set_level(logging.DEBUG)
    secret = {"type": "response.create", "input": "SECRET-PROMPT", "metadata": {"a": "SECRET-META"}}
    async with running() as server, server.connect() as socket:
        caplog.set_level(logging.DEBUG, "uvicorn.error")
        await receive(socket)
        await send(socket, **secret)
        await until(socket, *TERMINAL)
        await send(socket, **secret, temperature="SECRET-VALUE")
        await socket.send('{"type": "SECRET-BROKEN')
        await receive(socket)
        await receive(socket)
    async with running(tokenizer=Faulty()) as server, server.connect() as socket:
        await receive(socket)
        await send(socket, **secret)
        error = await receive(socket)
        assert error["type"] == "error"
        assert "SECRET" not in str(error)

    class Broken(FakeClient):
        async def submit(self, command):
            raise ValueError("chokes on SECRET-PROMPT")
            yield

    async with running(Broken()) as server, server.connect() as socket:
        await send(socket, **secret)
        failed = (await until(socket, *TERMINAL))[-1]
        assert failed["type"] == "response.failed"
        assert "SECRET" not in str(failed["response"]["error"])
    own = [record for record in caplog.records if not record.name.startswith(("websockets.client", "asyncio"))]
    assert any(record.levelno == logging.ERROR and "ValueError" in record.getMessage() for record in own)
    logged = "\n".join(logging.Formatter().format(record) for record in own)
    assert "SECRET" not in logged + "".join(capfd.readouterr())
