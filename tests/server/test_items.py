"""ResponseStream of several choices: one output item each."""

from __future__ import annotations

import pytest

from specserve.core.config import ServerConfig
from specserve.core.errors import SpecserveError
from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    SpeculationStep,
    StartedEvent,
    Usage,
)
from specserve.server.limits import Limits
from specserve.server.options import parse_responses
from specserve.server.response import ResponseStream


def make(**options):
    limits = Limits.of(ServerConfig(), 100, 300)
    request = parse_responses({"input": "hi", **options}, limits, "fake", socket=True)
    stream = ResponseStream("r", request, model="fake", created_at=1.0, stream_id="a")
    stream.open()
    return stream


def feed(stream, *events):
    return [wire for event in events for wire in stream.feed(event)]


def delta(index, text, *steps):
    return DeltaEvent("r", tuple(map(ord, text)), text, (), steps, index)


def end(index, reason="stop", score=None):
    return ChoiceFinishedEvent("r", index, reason, 100 + index, score)


def finished(reason="stop"):
    return FinishedEvent("r", reason, Usage(3, 9), 7)


def brief(events):
    """(type without its prefix, output index) of each."""
    return [(event["type"].removeprefix("response."), event.get("output_index")) for event in events]


def begun(index):
    return [("output_item.added", index), ("content_part.added", index)]


def closed(index):
    return [("output_text.done", index), ("content_part.done", index), ("output_item.done", index)]


def test_items_begin_in_order_and_end_as_their_choices_do():
    events = feed(
        make(n=3),
        StartedEvent("r", 7, 3, 0),
        delta(1, "a"),
        delta(0, "b"),
        end(1, "length"),
        delta(0, "c"),
        end(0),
        end(2),
        finished("length"),
    )
    assert brief(events) == [
        ("in_progress", None),
        *begun(0),
        *begun(1),
        ("output_text.delta", 1),
        ("output_text.delta", 0),
        *closed(1),
        ("output_text.delta", 0),
        *closed(0),
        *begun(2),
        *closed(2),
        ("incomplete", None),
    ]
    ids = {(event["output_index"], event["item_id"]) for event in events if "item_id" in event}
    assert len(ids) == len({item for _, item in ids}) == 3
    response = events[-1]["response"]
    assert (response["status"], response["n"], response["best_of"], response["seed"]) == ("incomplete", 3, None, 7)
    assert [
        (item["id"], item["content"][0]["text"], item["status"], item["finish_reason"], item["seed"], item["score"])
        for item in response["output"]
    ] == [
        (dict(ids)[0], "bc", "completed", "stop", 100, None),
        (dict(ids)[1], "a", "incomplete", "length", 101, None),
        (dict(ids)[2], "", "completed", "stop", 102, None),
    ]
    done = {event["output_index"]: event["item"] for event in events if event["type"].endswith("item.done")}
    assert [done[i] for i in range(3)] == response["output"]
    assert [event["sequence_number"] for event in events] == list(range(2, 2 + len(events)))


def test_hypotheses_come_whole_and_with_their_scores():
    stream = make(n=2, beam_width=4, length_penalty=0.5, early_stopping="never")
    events = feed(stream, delta(0, "a"), end(0, score=-0.25), delta(1, "b"), end(1, score=-0.5), finished())
    response = events[-1]["response"]
    assert (response["status"], response["temperature"]) == ("completed", 0.0)
    assert (response["beam_width"], response["length_penalty"], response["early_stopping"]) == (4, 0.5, "never")
    assert [item["score"] for item in response["output"]] == [-0.25, -0.5]


def test_one_choice_has_no_fields_of_several():
    response = feed(make(n=1), delta(0, "a"), finished())[-1]["response"]
    assert "n" not in response
    assert sorted(response["output"][0]) == ["content", "id", "role", "status", "type"]


@pytest.mark.parametrize("cut", ["cancelled by the engine", "cancelled", "failed"])
def test_choices_of_a_response_that_was_cut_have_no_end_of_their_own(cut):
    stream = make(n=4)
    feed(stream, delta(0, "a"), end(0), delta(2, "bc"))
    last = {
        "cancelled by the engine": lambda: stream.feed(finished("cancelled")),
        "cancelled": stream.cancel,
        "failed": lambda: stream.fail(SpecserveError("gone")),
    }[cut]()
    assert brief(last)[:-1] == [*closed(1), *closed(2)], "what ended is not told again, what never began is not told"
    response = last[-1]["response"]
    assert [(item["status"], item["finish_reason"]) for item in response["output"]] == [
        ("completed", "stop"),
        ("incomplete", None),
        ("incomplete", None),
    ]
    if cut != "cancelled by the engine":
        assert response["usage"]["output_tokens"] == 3, "of all choices"


def test_a_step_of_drafts_tells_its_choice():
    step = SpeculationStep((65,), ("A",), ("suffix",), 1)
    events = feed(make(n=2, report_speculation=True), delta(1, "A", step), delta(0, "", step))
    assert brief(events) == [
        ("speculation.delta", 1),
        *begun(0),
        *begun(1),
        ("output_text.delta", 1),
        ("speculation.delta", 0),
    ]


def test_a_dead_engine_leaves_what_was_seen_in_the_usage():
    stream = make(n=2)
    feed(stream, StartedEvent("r", 7, 3, 0), delta(0, "abc"), delta(1, "de"))
    stream.prompt_tokens = 3
    last = feed(stream, FailedEvent("r", "engine_died", "it died", status=503))[-1]
    usage = last["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (3, 5)


def test_errors_of_the_engine_name_what_the_client_wrote():
    stream = make()
    last = feed(stream, FailedEvent("r", "kv_capacity_exceeded", "prompt: 9 tokens are too many", "prompt", 400))[-1]
    error = last["response"]["error"]
    assert (error["param"], error["message"]) == ("input", "input: 9 tokens are too many")
