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
from specserve.core.sampling import choice_seed
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


TEXTS = ["nt>", "ant>", "tant>"]  # the ends of the prompt that tests.fakes.client.echo_choices gives as choices
MESSAGES = [{"role": "user", "content": "hi"}]


@in_loop
async def test_chat_completions_of_three_choices():
    async with running() as server, official(server) as client:
        whole = await client.chat.completions.create(model="fake", messages=MESSAGES, n=3, seed=5)
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, n=3, seed=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == TEXTS
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop", "length"]
    assert [choice.seed for choice in whole.choices] == [choice_seed(5, i) for i in range(3)]
    assert whole.usage.completion_tokens == 12
    by_choice = {i: [c.choices[0] for c in chunks if c.choices and c.choices[0].index == i] for i in range(3)}
    for i, own in by_choice.items():
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == TEXTS[i]
        assert [choice.finish_reason for choice in own if choice.finish_reason] == [whole.choices[i].finish_reason]
        assert own[-1].seed == choice_seed(5, i)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


@in_loop
async def test_the_clients_own_helper_gathers_a_chat_stream_of_three_choices():
    async with (
        running() as server,
        official(server) as client,
        client.chat.completions.stream(model="fake", messages=MESSAGES, n=3) as stream,
    ):
        async for _ in stream:
            pass
        whole = stream.current_completion_snapshot
    assert [(c.index, c.message.content) for c in whole.choices] == list(enumerate(TEXTS))


@in_loop
async def test_completions_with_best_of_and_with_beams():
    async with running() as server, official(server) as client:
        call = {"model": "fake", "prompt": "<assistant>"}
        best = await client.completions.create(**call, n=2, best_of=4)
        stream = await client.completions.create(**call, n=2, best_of=4, stream=True)
        pieces = [(c.choices[0].index, c.choices[0].text, c.choices[0].finish_reason) async for c in stream]
        beams = await client.completions.create(**call, n=2, seed=5, extra_body={"beam_width": 4})
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(**call, n=3, best_of=2)
    assert [(c.index, c.text, c.finish_reason) for c in best.choices] == [(0, "nt>", "stop"), (1, "ant>", "length")]
    assert [choice.score for choice in best.choices] == [-0.5, -1.0]
    assert pieces == [
        *((0, text, None) for text in "nt>"),
        (0, "", "stop"),
        *((1, text, None) for text in "ant>"),
        (1, "", "length"),
    ]
    assert [(choice.text, choice.score, choice.seed) for choice in beams.choices] == [
        ("nt>", -0.5, 5),
        ("ant>", -1.0, 5),
    ]
    assert (refused.value.param, refused.value.status_code) == ("best_of", 400)


@in_loop
async def test_responses_of_three_choices_over_http():
    three = {"model": "fake", "input": "hi", "extra_body": {"n": 3, "seed": 5}}
    async with running() as server, official(server) as client:
        whole = await client.responses.create(**three)
        stream = await client.responses.create(**three, stream=True)
        events = [event async for event in stream]
        async with client.responses.stream(**three) as helper:
            async for _ in helper:
                pass
    assert [item.content[0].text for item in whole.output] == TEXTS
    assert [item.status for item in whole.output] == ["completed", "completed", "incomplete"]
    assert [(i.finish_reason, i.seed) for i in whole.output] == [
        (reason, choice_seed(5, i)) for i, reason in enumerate(["stop", "stop", "length"])
    ]
    assert whole.output_text == "".join(TEXTS)
    check_items(events)


@in_loop
async def test_responses_of_three_choices_over_the_websocket():
    async with running() as server, official(server) as client, client.responses.connect() as connection:
        await connection.recv()
        await connection.send({"type": "response.create", "model": "fake", "input": "hi", "n": 3, "seed": 5})
        events = []
        while not events or events[-1].type not in TERMINAL:
            events.append(await connection.recv())
    check_items(events)


def check_items(events):
    """Each choice is an item of its own: added, streamed and done, in the final output at its index."""
    final = events[-1].response
    assert events[-1].type == "response.incomplete"
    for i, text in enumerate(TEXTS):
        own = [event for event in events if getattr(event, "output_index", None) == i]
        assert [event.type for event in own] == [
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * len(text),
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert "".join(event.delta for event in own if event.type.endswith("delta")) == text
        assert own[-1].item.id == final.output[i].id == own[0].item.id
        assert final.output[i].content[0].text == text
    assert final.usage.output_tokens == 12
