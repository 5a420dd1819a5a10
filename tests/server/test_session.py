"""The protocol without sockets: frames and engine events in, frames and engine commands out."""

from __future__ import annotations

import json

import pytest

from specserve.core.config import ServerConfig
from specserve.core.errors import InvalidRequestError
from specserve.core.messages import (
    AbortCommand,
    ChoiceFinishedEvent,
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
    SpeculationStep,
    StartedEvent,
    Usage,
)
from specserve.server.limits import Limits
from specserve.server.session import Prepare, Send, Session


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(clock=None, **config):
    limits = Limits.of(ServerConfig(**config), 100, 300)
    return Session(limits, "fake", "tenant", clock or Clock())


def frame(session, **event):
    return session.receive_text(json.dumps(event))


def create(session, **options):
    """A create that is prepared: (response id, outputs of `prepared`)."""
    (job,) = frame(session, type="response.create", **{"input": "hi", **options})
    assert isinstance(job, Prepare), job
    return job.response_id, session.prepared(job.response_id, (1, 2, 3))


def wire(outputs):
    return [output.event for output in outputs if isinstance(output, Send)]


def kinds(outputs):
    return [event["type"] for event in wire(outputs)]


def error(outputs):
    (event,) = wire(outputs)
    assert len(outputs) == 1
    assert event["type"] == "error"
    return event


def test_a_response_from_create_to_completed():
    session = make()
    name, out = create(session, stream_id="a", priority=2, report_speculation=True)
    assert kinds(out) == ["response.created", "response.queued"]
    command = out[-1]
    assert isinstance(command, GenerateCommand)
    assert (command.request_id, command.namespace, command.priority) == (name, "tenant", 2)
    assert kinds(session.engine_event(name, StartedEvent(name, 5, 3, 0))) == ["response.in_progress"]
    step = SpeculationStep((7, 8), ("x", "y"), ("suffix", "suffix"), 1)
    events = wire(session.engine_event(name, DeltaEvent(name, (7,), "x", (), (step,))))
    assert [event["type"] for event in events] == [
        "response.speculation.delta",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]
    assert (events[0]["drafted"], events[0]["accepted"], events[0]["rejected"]) == (2, 1, 1)
    assert events[0]["tokens"][1] == {"token_id": 8, "text": "y", "source": "suffix"}
    out = session.engine_event(name, FinishedEvent(name, "stop", Usage(3, 1), 5, "fast"))
    assert kinds(out)[-1] == "response.completed"
    assert wire(out)[-1]["response"]["numerics"] == "fast"
    assert session.active == 0


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (FinishedEvent("x", "stop", Usage(), 1), "response.completed"),
        (FinishedEvent("x", "length", Usage(), 1), "response.incomplete"),
        (FinishedEvent("x", "cancelled", Usage(), 1), "response.cancelled"),
        (FailedEvent("x", "engine_died", "it died", status=503), "response.failed"),
    ],
)
def test_trap_e11_nothing_follows_the_terminal_event(end, kind):
    session = make()
    name, _ = create(session)
    assert kinds(session.engine_event(name, end))[-1] == kind
    assert session.engine_event(name, end) == []
    assert session.failed(name, InvalidRequestError("late")) == []
    assert session.shutdown() == session.tick() == session.disconnected() == []


def test_responses_of_one_lane_run_in_order():
    session = make()
    first, out = create(session, stream_id="a")
    assert isinstance(out[-1], GenerateCommand)
    second, out = create(session, stream_id="a")
    assert kinds(out) == ["response.created", "response.queued"]
    assert len(out) == 2, "the second waits"
    third, _ = create(session, stream_id="a")
    assert kinds(frame(session, type="response.cancel", response_id=second)) == ["response.cancelled"]
    out = session.engine_event(first, FinishedEvent(first, "stop", Usage(), 1))
    assert out[-1].request_id == third


def test_without_a_stream_id_responses_run_at_once():
    session = make()
    names = [create(session) for _ in range(2)]
    assert all(isinstance(out[-1], GenerateCommand) for _, out in names)
    assert len({wire(out)[0]["stream_id"] for _, out in names}) == 2


def test_a_cancel_before_the_prompt_is_tokenised():
    session = make()
    (job,) = frame(session, type="response.create", input="hi", stream_id="a")
    out = frame(session, type="response.cancel", stream_id="a")
    assert kinds(out) == ["response.created", "response.queued", "response.cancelled"]
    assert session.prepared(job.response_id, (1,)) == []


def test_a_cancel_of_a_running_response_is_the_engines_to_end():
    session = make()
    name, _ = create(session)
    assert frame(session, type="response.cancel", response_id=name) == [AbortCommand(name)]
    assert session.active == 1


def test_a_response_of_many_choices_is_one_response():
    session = make(max_responses=2)
    first, _ = create(session, n=64)
    create(session, n=64)
    assert session.active == 2
    assert error(frame(session, type="response.create", input="hi"))["error"]["code"] == "too_many_responses"
    assert session.engine_event(first, ChoiceFinishedEvent(first, 0, "stop", 1))
    assert session.active == 2, "an end of a choice is not the response's"
    session.engine_event(first, FinishedEvent(first, "stop", Usage(), 1))
    assert session.active == 1


def test_too_many_responses():
    session = make(max_responses=2)
    first, _ = create(session)
    create(session)
    event = error(frame(session, type="response.create", input="hi", stream_id="c"))
    assert (event["error"]["code"], event["stream_id"], event["status"]) == ("too_many_responses", "c", 429)
    session.engine_event(first, FinishedEvent(first, "stop", Usage(), 1))
    create(session)


def test_a_prompt_that_does_not_fit_is_one_error_and_no_response():
    session = make()
    (job,) = frame(session, type="response.create", input="hi", stream_id="a", max_output_tokens=60)
    event = error(session.prepared(job.response_id, tuple(range(50))))
    assert (event["error"]["param"], event["stream_id"]) == ("max_output_tokens", "a")
    (job,) = frame(session, type="response.create", input="hi", stream_id="a")
    event = error(session.prepared(job.response_id, tuple(range(100))))
    assert (event["error"]["param"], event["error"]["code"]) == ("input", "context_length_exceeded")
    assert session.active == 0


def test_trap_e18_heartbeats_only_in_silence():
    clock = Clock()
    session = make(clock, heartbeat_seconds=10)
    name, _ = create(session)
    clock.now = 9
    assert session.tick() == []
    clock.now = 10
    assert kinds(session.tick()) == ["response.queued"]
    assert session.tick() == []
    session.engine_event(name, StartedEvent(name, 1, 3, 2))
    clock.now = 20
    (event,) = wire(session.tick())
    assert (event["type"], event["prefill"]) == ("response.in_progress", {"computed": 2, "total": 3})


def test_a_vanished_client_aborts_what_the_engine_has():
    session = make()
    first, _ = create(session, stream_id="a")
    create(session, stream_id="a")
    frame(session, type="response.create", input="not prepared")
    assert session.disconnected() == [AbortCommand(first)]


def test_shutdown_ends_every_response_once():
    session = make()
    name, _ = create(session, stream_id="a")
    create(session, stream_id="a")
    frame(session, type="response.create", input="not prepared", stream_id="b")
    out = session.shutdown()
    assert [event["type"] for event in wire(out)].count("response.failed") == 3
    assert [output for output in out if not isinstance(output, Send)] == [AbortCommand(name)]
    assert error(frame(session, type="response.create", input="x"))["error"]["code"] == "shutting_down"


def test_errors_of_the_engine_use_the_clients_names():
    session = make()
    format_ = {"type": "json_schema", "name": "n", "schema": {"type": "x"}}
    name, _ = create(session, text={"format": format_})
    out = session.engine_event(name, FailedEvent(name, "invalid_grammar", "bad", "guided.json_schema/type", 400))
    assert wire(out)[-1]["response"]["error"] == {
        "message": "bad",
        "type": "invalid_request_error",
        "param": "text.format.schema/type",
        "code": "invalid_grammar",
    }


def test_the_clients_event_id_comes_back_in_its_error():
    event = error(frame(make(), type="response.create", event_id="mine", stream_id="s", input=1))
    assert (event["error"]["event_id"], event["stream_id"]) == ("mine", "s")
