from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.core.errors import InvalidRequestError
from specserve.core.messages import (
    AbortCommand,
    DeltaEvent,
    EngineStats,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
    Logprob,
    PositionLogprobs,
    ProgressEvent,
    QueuedEvent,
    SpeculationStep,
    StartedEvent,
    Usage,
)
from specserve.core.sampling import SamplingParams
from specserve.engine import codec

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
COUNTS = st.integers(0, 2**40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def params_of(values):
    if values.get("guided") is not None:  # refused together
        values = {name: value for name, value in values.items() if name not in ("stop", "stop_token_ids")}
    return SamplingParams(**values)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.none() | st.integers(1, 10**6),
        "temperature": st.just(0.0) | st.floats(0.01, 10),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(0, 100),
        "seed": st.none() | st.integers(0, 2**64 - 1),
        "stop": st.none() | NAMES | st.lists(NAMES, max_size=3),
        "logprobs": st.none() | st.integers(0, 20),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
        "allowed_token_ids": st.none() | IDS.filter(bool),
        "banned_token_ids": IDS,
        "stop_token_ids": IDS,
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.floats(0.01, 10),
        "guided": st.none() | JSON.map(lambda schema: {"json_schema": schema}),
        "speculation": st.none() | st.booleans() | st.integers(0, 64).map(lambda n: {"num_speculative_tokens": n}),
    },
).map(params_of)
GENERATE = st.builds(GenerateCommand, NAMES, IDS, PARAMS, NAMES, st.integers(-5, 5), st.booleans())
USAGE = st.builds(
    Usage, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.dictionaries(NAMES, st.tuples(COUNTS, COUNTS), max_size=3)
)
LOGPROB = st.builds(Logprob, st.integers(0, 10**6), NAMES, st.none() | st.floats(-1e9, 0))
DELTA = st.builds(
    DeltaEvent,
    NAMES,
    IDS,
    NAMES,
    st.lists(st.builds(PositionLogprobs, LOGPROB, st.lists(LOGPROB, max_size=3).map(tuple)), max_size=3).map(tuple),
    st.lists(st.builds(SpeculationStep, IDS, st.just(("a",)), st.just(("s",)), st.integers(0, 9)), max_size=2).map(
        tuple
    ),
)
SEEDS = st.integers(0, 2**64 - 1)
EVENTS = st.one_of(
    st.builds(QueuedEvent, NAMES),
    st.builds(StartedEvent, NAMES, SEEDS, COUNTS, COUNTS),
    st.builds(ProgressEvent, NAMES, COUNTS, COUNTS),
    DELTA,
    st.builds(FinishedEvent, NAMES, NAMES, USAGE, SEEDS, NAMES),
    st.builds(FailedEvent, NAMES, NAMES, NAMES, st.none() | NAMES, st.integers(400, 599), USAGE),
)


@given(st.one_of(GENERATE, st.builds(AbortCommand, NAMES)))
def test_commands_come_back_as_they_were(command):
    tag, body = codec.unpack(codec.encode_command(command))
    assert tag == codec.COMMANDS
    assert codec.decode_commands(body) == [command]


@given(st.lists(EVENTS, max_size=4))
def test_events_come_back_as_they_were(events):
    tag, body = codec.unpack(codec.encode_events(events))
    assert tag == codec.EVENTS
    assert codec.decode_events(body) == events


@given(st.builds(EngineStats, COUNTS, COUNTS, counters=st.dictionaries(NAMES, st.floats(0, 1e18), max_size=3)))
def test_stats_come_back_as_they_were(stats):
    tag, body = codec.unpack(codec.encode_stats(stats))
    assert tag == codec.STATS
    assert codec.decode_stats(body) == stats


def test_every_field_of_params_is_carried():
    schema = {"z": 1, "a": {"maximum": 10**40}}
    params = SamplingParams(logit_bias={7: 1.5}, guided={"json_schema": schema, "whitespace": "compact"}, seed=3)
    command = GenerateCommand("a", (1,), params)
    (back,) = codec.decode_commands(codec.unpack(codec.encode_command(command))[1])
    assert back == command
    assert list(back.params.guided["json_schema"]) == ["z", "a"], "declared order is kept"
    assert back.params.logit_bias == {7: 1.5}


@pytest.mark.parametrize(
    "params",
    [{"stop": "\ud800"}, {"guided": {"json_schema": {"a": object()}}}, {"guided": {"choice": {1, 2}}}],
)
def test_what_cannot_be_sent_is_a_typed_error(params):
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        codec.encode_command(GenerateCommand("a", (1,), SamplingParams(**params)))


@given(st.binary(max_size=40))
def test_noise_is_refused_with_a_typed_error(noise):
    with contextlib.suppress(codec.CodecError, InvalidRequestError):
        codec.decode_commands(codec.unpack(b"C" + bytes([codec.VERSION]) + noise)[1])


def test_other_versions_are_refused():
    message = codec.encode_events([QueuedEvent("a")])
    with pytest.raises(codec.CodecError, match="version"):
        codec.unpack(message[:1] + bytes([codec.VERSION + 1]) + message[2:])
    with pytest.raises(codec.CodecError):
        codec.unpack(b"")
    with pytest.raises(codec.CodecError):
        codec.decode_events(codec.unpack(codec.pack(codec.EVENTS, [("NoEvent", {})]))[1])
