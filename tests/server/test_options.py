"""Options of the Responses API: what is taken, what is refused, under which name."""

from __future__ import annotations

import pytest

from specserve.core.config import ServerConfig
from specserve.core.errors import InvalidRequestError
from specserve.server.chat import parse_chat, parse_completion
from specserve.server.codec import dumps, loads
from specserve.server.limits import Limits
from specserve.server.options import parse_responses

LIMITS = Limits.of(ServerConfig(), 100, 300)


def parse(**values):
    return parse_responses({"input": "hi", **values}, LIMITS, "fake", socket=True)


def test_every_option_arrives():
    request = parse(
        input=[
            {"type": "message", "role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"id": "m", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        ],
        instructions="i",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        seed=2**64 - 1,
        stop=["x", "y"],
        min_tokens=2,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": 2},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        speculation={"num_speculative_tokens": 2},
        report_speculation=True,
        priority=-3,
    )
    assert request.prompt.messages == (
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    )
    params = request.params
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (9, 0.5, 2**64 - 1, ("x", "y"))
    assert (params.logprobs, params.logit_bias) == (3, {5: 2.0})
    assert (params.draft_cap(), request.priority, request.report_speculation) == (2, -3, True)


def test_a_stop_text_would_cut_guided_output_and_is_refused():
    with pytest.raises(InvalidRequestError) as refused:
        parse(structured_outputs={"regex": "a+"}, stop=["x"])
    assert refused.value.param == "stop"


def test_defaults_are_the_apis():
    params = parse(temperature=None, tools=[], store=True, top_logprobs=0, truncation="disabled").params
    assert (params.temperature, params.max_tokens, params.logprobs, params.guided) == (1.0, None, None, None)


@pytest.mark.parametrize(
    ("values", "guided"),
    [
        ({"text": {"format": {"type": "text"}}}, None),
        ({"text": {"format": {"type": "json_object"}}}, {"json_object": True}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True}}},
            {"json_schema": {"a": 1}},
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, {"json_schema": {"type": "null"}}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json_schema": {"type": "null"}}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"grammar": {"name": "json"}}}, {"grammar": {"name": "json"}}),
    ],
)
def test_guided_options(values, guided):
    assert parse(**values).params.guided == guided


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"temperature": "x"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"seed": 2.0}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"speculation": {"k": 1}}, "speculation.k"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"guided": {"regex": "a"}}, "guided"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"form": {}}}, "text.form"),
        ({"text": []}, "text"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
            "structured_outputs",
        ),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"generate": False}, "generate"),
        ({"stream": False}, "stream"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"stream_id": ""}, "stream_id"),
        ({"stream_id": "x" * 129}, "stream_id"),
        ({"instructions": 1}, "instructions"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "weight": 1}]}, "input[0].weight"),
        ({"model": "other"}, "model"),
        ({"model": 1}, "model"),
        ({"priority": 1.5}, "priority"),
    ],
)
def test_faults_are_named_as_the_client_names_them(values, param):
    with pytest.raises(InvalidRequestError) as caught:
        parse(**values)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"banned_token_ids": [-1]}, "banned_token_ids[0]"),
        ({"input": None, "prompt_token_ids": [1, 300]}, "prompt_token_ids"),
        ({"input": None, "prompt_token_ids": [1, "2"]}, "prompt_token_ids[1]"),
        ({"prompt_token_ids": [1]}, "input"),
    ],
)
def test_trap_g8_ids_outside_the_vocabulary(values, param):
    with pytest.raises(InvalidRequestError) as caught:
        parse(**values)
    assert caught.value.param == param


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', '{"a": 1e999}', "[]", "", '{"a": "\\ud800"}', "{" * 99])
def test_json_that_is_refused(text):
    with pytest.raises(InvalidRequestError) as caught:
        loads(text)
    assert caught.value.code == "invalid_json"


def test_deep_nesting_is_refused_and_shallow_is_not():
    def nested(depth):
        return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    loads(nested(128))
    with pytest.raises(InvalidRequestError):
        loads(nested(129))
    with pytest.raises(InvalidRequestError):
        loads(nested(100_000))


def test_what_json_cannot_carry_is_replaced():
    assert dumps({"a": float("nan"), "b": float("-inf")}) == b'{"a":null,"b":null}'
    assert dumps({"text": "x\ud800"}) == b'{"text":"x?"}'


APIS = {
    "responses": lambda values: parse(**values),
    "http responses": lambda values: parse_responses({"input": "hi", **values}, LIMITS, "fake", socket=False),
    "chat": lambda values: parse_chat({"messages": [{"role": "user", "content": "a"}], **values}, LIMITS, "fake"),
    "completions": lambda values: parse_completion({"prompt": "a", **values}, LIMITS, "fake"),
}
every_api = pytest.mark.parametrize("api", APIS)


@every_api
def test_choices_and_beams_are_options_of_every_api(api):
    params = APIS[api]({"n": 64, "best_of": 64, "temperature": 0.5}).params
    assert (params.n, params.best_of, params.num_sequences) == (64, 64, 64)
    beams = {"n": 2, "beam_width": 16, "length_penalty": -1, "early_stopping": "never"}
    params = APIS[api](beams).params
    assert (params.n, params.beams, params.length_penalty, params.early_stopping) == (2, 16, -1.0, "never")


@every_api
def test_one_choice_may_be_said_in_many_ways(api):
    for values in (
        {"n": 1, "best_of": 1},
        {"n": None, "best_of": None, "beam_width": None, "length_penalty": None, "early_stopping": None},
    ):
        params = APIS[api](values).params
        assert (params.num_sequences, params.temperature) == (1, 1.0)


@every_api
@pytest.mark.parametrize("width", [1, 4])
def test_beams_do_not_sample_by_default(api, width):
    assert APIS[api]({"beam_width": width}).params.temperature == 0.0
    assert APIS[api]({"beam_width": width, "temperature": 0}).params.temperature == 0.0


@every_api
@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": True}, "n"),
        ({"n": 2.0}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 65}, "best_of"),
        ({"beam_width": 17}, "beam_width"),
        ({"beam_width": [4]}, "beam_width"),
        ({"beam_width": 4, "n": 5}, "n"),
        ({"beam_width": 4, "best_of": 4}, "best_of"),
        ({"beam_width": 4, "temperature": 1}, "temperature"),
        ({"beam_width": 4, "length_penalty": "long"}, "length_penalty"),
        ({"beam_width": 4, "early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_faults_of_choices_and_beams_are_named(api, values, param):
    with pytest.raises(InvalidRequestError) as refused:
        APIS[api](values)
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param}: ")
    assert refused.value.status == 400


def test_two_different_limits_of_a_chat_are_refused():
    values = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert parse_chat({**values, "max_completion_tokens": 3}, LIMITS, "fake").params.max_tokens == 3
    with pytest.raises(InvalidRequestError) as refused:
        parse_chat({**values, "max_completion_tokens": 4}, LIMITS, "fake")
    assert refused.value.param == "max_tokens"
