"""ResponseStream by itself."""

from __future__ import annotations

import pytest

from specserve.core.config import ServerConfig
from specserve.core.errors import SpecserveError
from specserve.core.messages import DeltaEvent, FinishedEvent, Usage
from specserve.server.limits import Limits
from specserve.server.options import parse_responses
from specserve.server.response import ResponseStream


def make():
    request = parse_responses({"input": "hi"}, Limits.of(ServerConfig(), 100, 300), "fake", socket=True)
    return ResponseStream("resp_1", request, model="fake", created_at=1.0, stream_id="a")


@pytest.mark.parametrize("end", ["stop", "cancel", "fail"])
def test_trap_e11_one_terminal_event_whatever_comes_after(end):
    stream = make()
    stream.open()
    stream.feed(DeltaEvent("resp_1", (1,), "x"))
    finished = FinishedEvent("resp_1", "stop", Usage(), 1)
    ends = {
        "stop": lambda: stream.feed(finished),
        "cancel": stream.cancel,
        "fail": lambda: stream.fail(SpecserveError("x")),
    }
    assert ends[end]()
    late = [DeltaEvent("resp_1", (2,), "y"), finished]
    assert [stream.feed(event) for event in late] == [[], []]
    assert stream.cancel() == stream.heartbeat() == stream.fail(SpecserveError("x")) == []


def test_an_empty_answer_still_has_its_item():
    stream = make()
    stream.open()
    events = stream.feed(FinishedEvent("resp_1", "stop", Usage(3, 1), 1))
    assert [event["type"] for event in events] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_failure_in_mid_text_closes_the_item_as_incomplete():
    stream = make()
    stream.open()
    stream.feed(DeltaEvent("resp_1", (1,), "par"))
    events = stream.fail(SpecserveError("gone", code="engine_died"))
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.failed"]
    item = events[-1]["response"]["output"][0]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "par")
