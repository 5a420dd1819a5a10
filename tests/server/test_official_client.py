"""The official openai client, unchanged, against a real server."""

from __future__ import annotations

import json

import openai
import pytest
from openai import AsyncOpenAI

from specserve.core.messages import (
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    Logprob,
    PositionLogprobs,
    StartedEvent,
    Usage,
)
from tests.fakes.client import FakeClient
from tests.fakes.server import TERMINAL, in_loop, running


def official(server, key="none"):
    return AsyncOpenAI(base_url=server.http + "/v1", api_key=key, max_retries=0)


def with_logprobs(command):
    name = command.request_id
    yield StartedEvent(name, 1, 3, 2)
    for text in ("o", "k"):
        entry = Logprob(ord(text), text, -0.5)
        yield DeltaEvent(name, (ord(text),), text, (PositionLogprobs(entry, (entry, Logprob(1, "x", None))),))
    yield FinishedEvent(name, "stop", Usage(3, 2, 2), 1)


def refused(command):
    yield FailedEvent(command.request_id, "invalid_grammar", "guided.json_schema: no", "guided.json_schema", 400)


@in_loop
async def test_responses_over_the_websocket():
    async with running() as server, official(server) as client, client.responses.connect() as connection:
        await connection.response.create(
            model="fake",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
            instructions="be brief",
            max_output_tokens=200,
            temperature=0.5,
            store=False,
            tools=[],
            stream_id="lane",
            metadata={"k": "v"},
        )
        events = []
        async for event in connection:
            events.append(event)
            if event.type in TERMINAL:
                break
    assert events[0].type == "session.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert events[-1].type == "response.completed"
    assert text == final.output_text == "<system>be brief<user>hello<assistant>"
    assert final.usage.total_tokens == 2 * len(text)
    assert final.metadata == {"k": "v"}
    assert events[-1].stream_id == "lane"


@in_loop
async def test_an_error_over_the_websocket_is_the_clients_error_event():
    async with running() as server, official(server) as client, client.responses.connect() as connection:
        await connection.recv()
        await connection.response.create(input="x", previous_response_id="resp_1")
        event = await connection.recv()
    assert event.type == "error"
    assert (event.error.param, event.error.code, event.status) == (
        "previous_response_id",
        "unsupported_parameter",
        400,
    )


@in_loop
async def test_responses_over_http():
    async with running() as server, official(server) as client:
        whole = await client.responses.create(model="fake", input="hi", extra_body={"seed": 5})
        assert whole.output_text == "<user>hi<assistant>"
        assert (whole.status, whole.seed) == ("completed", 5)
        stream = await client.responses.create(model="fake", input="hi", stream=True, max_output_tokens=4)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "<use"


@in_loop
async def test_chat_completions():
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    async with running() as server, official(server) as client:
        whole = await client.chat.completions.create(model="fake", messages=messages, seed=5)
        assert whole.choices[0].message.content == "<system>d<user>hi<assistant>"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens_details.reasoning_tokens == 0
        assert whole.usage.speculation["accepted"] == 3
        stream = await client.chat.completions.create(
            model="fake",
            messages=messages,
            stream=True,
            max_completion_tokens=6,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "<syste"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 6


@in_loop
async def test_chat_options_reach_the_engine():
    fake = FakeClient(with_logprobs)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with running(fake) as server, official(server) as client:
        whole = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=7,
            logprobs=True,
            top_logprobs=2,
            logit_bias={"65": 1},
            frequency_penalty=0.5,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
            extra_body={"top_k": 3, "speculation": False},
        )
        await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"structured_outputs": {"choice": ["a", "b"]}},
        )
        await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], stop=["END"])
    params = fake.commands[0].params
    assert params.guided == {"json_schema": schema}
    assert (params.max_tokens, params.logprobs, params.top_k) == (7, 2, 3)
    assert (params.logit_bias, params.frequency_penalty, params.speculation) == ({65: 1.0}, 0.5, False)
    assert fake.commands[1].params.guided == {"choice": ["a", "b"]}
    assert fake.commands[2].params.stop == ("END",)
    content = whole.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["o", "k"]
    assert content[0].top_logprobs[1].logprob is None
    assert whole.usage.prompt_tokens_details.cached_tokens == 2


@in_loop
async def test_completions():
    async with running() as server, official(server) as client:
        whole = await client.completions.create(model="fake", prompt="abc")
        ids = await client.completions.create(model="fake", prompt=[65, 66, 67])
        stream = await client.completions.create(model="fake", prompt="abc", stream=True, max_tokens=2)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert (whole.choices[0].text, ids.choices[0].text) == ("abc", "ABC")
    assert "".join(pieces) == "ab"


@in_loop
async def test_models():
    async with running() as server, official(server) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_trap_c11_c13_a_refused_grammar_is_a_400_and_the_next_request_works(stream):
    fake = FakeClient(refused)
    call = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": "("}}}
    async with running(fake) as server, official(server) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**call, response_format=format_)
        assert caught.value.param == "response_format.json_schema.schema"
        assert caught.value.code == "invalid_grammar"
        fake.script = None
        await client.chat.completions.create(**call)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="fake", input="x", text={"format": {"type": "yaml"}})
    assert json.loads(caught.value.response.text)["error"]["param"] == "text.format.type"


@in_loop
async def test_trap_e8_keys_over_http_and_websocket():
    async with running(api_keys=("sk-right",)) as server:
        async with official(server, "sk-right") as client:
            assert (await client.responses.create(model="fake", input="hi")).status == "completed"
            async with client.responses.connect() as connection:
                assert (await connection.recv()).type == "session.created"
        async with official(server, "sk-wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(model="fake", input="hi")
