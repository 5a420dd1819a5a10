"""The Python API's results of several choices, over a backend that plays events."""

from __future__ import annotations

import asyncio

import pytest

from specserve.core.errors import EngineDeadError
from specserve.core.messages import (
    AbortCommand,
    ChoiceFinishedEvent,
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    Logprob,
    PositionLogprobs,
    Usage,
)
from specserve.core.sampling import SamplingParams
from specserve.llm import LLM
from tests.fakes.client import FakeTokenizer, echo, echo_choices

PROMPT = "abcdef"


class Player:
    """A backend that answers each command at once with the events that `script` gives."""

    def __init__(self, script):
        self._script = script

    def start(self, deliver):
        self._deliver = deliver

    def send(self, command):
        if not isinstance(command, AbortCommand):
            self._deliver(list(self._script(command)))

    def close(self):
        pass


def generate(script, *prompts, **params):
    with LLM.over(Player(script), FakeTokenizer()) as llm:
        return llm.generate(list(prompts or [PROMPT]), SamplingParams(**params))


def delta(command, index, text):
    entries = tuple(PositionLogprobs(Logprob(ord(c), c, -1.0)) for c in text)
    return DeltaEvent(command.request_id, tuple(map(ord, text)), text, entries, index=index)


def script_of(*parts, reason="stop"):
    """Parts (index, text) are deltas, (index, reason, score) ends of choices."""

    def play(command):
        for part in parts:
            if len(part) == 2:
                yield delta(command, *part)
            else:
                yield ChoiceFinishedEvent(command.request_id, part[0], part[1], 100 + part[0], part[2])
        yield FinishedEvent(command.request_id, reason, Usage(6, 9), 7)

    return play


SIDE_BY_SIDE = script_of(
    (1, "x"), (0, "a"), (1, "yz"), (1, "length", None), (0, "b"), (0, "stop", None), (2, "stop", None)
)


def test_choices_that_came_side_by_side_are_told_apart():
    (result,) = generate(SIDE_BY_SIDE, n=3)
    assert [(c.index, c.text, c.token_ids, c.finish_reason, c.seed, c.score) for c in result.choices] == [
        (0, "ab", [97, 98], "stop", 100, None),
        (1, "xyz", [120, 121, 122], "length", 101, None),
        (2, "", [], "stop", 102, None),
    ]
    assert [c.logprobs for c in result.choices] == [None] * 3


def test_the_fields_of_a_result_are_those_of_its_first_choice():
    (result,) = generate(
        script_of((0, "best"), (0, "length", -0.5), (1, "b"), (1, "stop", -1.0)), n=2, best_of=4, logprobs=0
    )
    first = result.choices[0]
    assert (first.text, first.finish_reason, first.seed, first.score) == ("best", "length", 100, -0.5)
    assert (result.text, result.token_ids, result.finish_reason) == (first.text, first.token_ids, first.finish_reason)
    assert (result.seed, result.logprobs) == (first.seed, first.logprobs)
    assert [len(c.logprobs) for c in result.choices] == [4, 1]
    assert result.usage == Usage(6, 9), "of the whole request"


def test_one_choice_ends_as_the_request_does():
    (result,) = generate(script_of((0, "a"), reason="length"), logprobs=0)
    (only,) = result.choices
    assert (only.index, only.text, only.finish_reason, only.seed, only.score) == (0, "a", "length", 7, None)
    assert only.logprobs == result.logprobs
    assert len(only.logprobs) == 1
    assert len(generate(script_of())[0].choices) == 1, "also of an empty answer"


def test_a_cancelled_request_has_the_choices_that_began():
    (result,) = generate(script_of((1, "b"), (1, "stop", None), reason="cancelled"), n=3)
    assert [(c.text, c.finish_reason) for c in result.choices] == [("", "cancelled"), ("b", "stop")]


def test_prompts_keep_their_own_choices():
    results = generate(echo_choices, "abcdef", "uvwxyz", n=2, seed=3)
    assert [[c.text for c in result.choices] for result in results] == [["def", "cdef"], ["xyz", "wxyz"]]


@pytest.mark.parametrize(("script", "params", "ends"), [(echo, {}, 0), (echo_choices, {"n": 3}, 3)])
def test_a_stream_yields_deltas_choices_ends_and_the_end(script, params, ends):
    async def collect():
        with LLM.over(Player(script), FakeTokenizer()) as llm:
            return [event async for event in llm.stream(PROMPT, SamplingParams(**params))]

    events = asyncio.run(collect())
    assert isinstance(events[-1], FinishedEvent)
    assert {type(event) for event in events[:-1]} <= {DeltaEvent, ChoiceFinishedEvent}
    closed = [event.index for event in events if isinstance(event, ChoiceFinishedEvent)]
    assert sorted(closed) == list(range(ends))
    text = "".join(event.text for event in events[:-1] if isinstance(event, DeltaEvent) and event.index == 0)
    assert text == (PROMPT[-3:] if ends else PROMPT)
    for index in closed:
        own = [type(event) for event in events[:-1] if event.index == index]
        assert own[-1] is ChoiceFinishedEvent


def test_a_failure_between_choices_is_the_requests():
    def script(command):
        yield delta(command, 0, "a")
        yield ChoiceFinishedEvent(command.request_id, 0, "stop", 1)
        yield FailedEvent(command.request_id, "engine_died", "it died", status=503)

    with pytest.raises(EngineDeadError):
        generate(script, n=2)
