from __future__ import annotations

import logging
import time

import pytest

from specserve.core.errors import EngineDeadError
from specserve.core.messages import (
    AbortCommand,
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
    ProgressEvent,
    QueuedEvent,
)
from specserve.core.sampling import SamplingParams
from specserve.engine.faults import describe, error_of, failed_event
from tests.fakes.engines import SIZE, VOCABULARY, answer, command, make_rig
from tests.fakes.grammar import ChoiceMatcher

V = VOCABULARY


def only(events, request_id="a"):
    (event,) = events[request_id]
    return event


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {SIZE: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (1, SIZE)}, "allowed_token_ids[1]"),
        ({"banned_token_ids": (SIZE,)}, "banned_token_ids[0]"),
        ({"stop_token_ids": (SIZE + 5,)}, "stop_token_ids[0]"),
    ],
)
def test_trap_g8_ids_outside_of_the_vocabulary(params, param):
    event = only(make_rig().run(command("a", **params)))
    assert (event.code, event.status, event.param) == ("invalid_request", 400, param)


@pytest.mark.parametrize("ids", [(5, -1), (SIZE,), (True,), ("x",), (1.0,)])
def test_trap_g8_prompt_ids(ids):
    rig = make_rig()
    event = only(rig.run(GenerateCommand("a", ids, SamplingParams())))
    assert (event.code, event.status) == ("invalid_request", 400)
    assert event.param.startswith("prompt[")
    assert answer(rig.run(command("b"))["b"]).reason == "length"


def test_empty_and_too_long_prompts():
    rig = make_rig(max_model_len=10)
    assert only(rig.run(GenerateCommand("a", (), SamplingParams()))).code == "invalid_request"
    event = only(rig.run(command("a", [5] * 10)))
    assert (event.code, event.status, event.param) == ("context_length_exceeded", 400, "prompt")
    assert answer(rig.run(command("a", [5] * 9))["a"]).reason == "length"


def test_a_full_queue_refuses_with_a_503():
    rig = make_rig(max_waiting=2)
    events = rig.run(*(command(str(i), max_tokens=2) for i in range(3)))
    event = only(events, "2")
    assert (event.code, event.status) == ("overloaded", 503)
    assert answer(events["1"]).reason == "length"


@pytest.mark.parametrize("where", ["forward", "sample"])
def test_trap_e11_a_failed_step_ends_its_requests_once_and_the_engine_goes_on(where):
    rig = make_rig(drafts=3)
    for name in "ab":
        rig.engine.handle(command(name, f"hi{name}", max_tokens=20))
    seen = [*rig.step(), *rig.step()]
    rig.executor.fail_next, rig.executor.fail_in = RuntimeError("secret text"), where
    seen += rig.step()
    failed = [e for e in seen if isinstance(e, FailedEvent)]
    assert sorted(e.request_id for e in failed) == ["a", "b"]
    assert all(e.status == 500 and "secret" not in e.message for e in failed)
    assert all(e.usage.completion_tokens > 0 for e in failed)
    assert not rig.engine.has_work
    rig.check_baseline()
    again = answer(rig.run(command("c", "hia", max_tokens=20))["c"])
    assert again.token_ids == answer(make_rig().run(command("c", "hia", max_tokens=20))["c"]).token_ids


def test_outputs_of_another_plan_fail_the_step():
    rig = make_rig()
    sample = rig.executor.sample
    rig.executor.sample = lambda plan, masks: type(sample(plan, masks))(plan.step, ())
    assert only({"a": [e for e in rig.run(command("a"))["a"] if isinstance(e, FailedEvent)]}).status == 500


def test_no_legal_token_fails_that_request_alone():
    rig = make_rig()
    bad = command("a", allowed_token_ids=(5,), banned_token_ids=(5,))
    events = rig.run(bad, command("b"))
    assert events["a"][-1].code == "no_legal_token"
    assert events["a"][-1].status == 400
    assert answer(events["b"]).reason == "length"


def test_fail_all_ends_everything_once():
    rig = make_rig()
    rig.compiler.gate.clear()
    rig.engine.handle(command("a", max_tokens=50))
    rig.engine.handle(command("b", guided={"choice": ["ab"]}))
    rig.step()
    events = rig.engine.fail_all(EngineDeadError("gone"))
    assert sorted(e.request_id for e in events if isinstance(e, FailedEvent)) == ["a", "b"]
    rig.check_baseline()
    rig.compiler.gate.set()
    assert not rig.engine.has_work


def abort(rig, name="a"):
    """Abort and take one step: the events of the request."""
    rig.engine.handle(AbortCommand(name))
    return [e for e in rig.engine.step() if e.request_id == name]


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_trap_d6_d8_abort_while_running(steps):
    rig = make_rig(drafts=3, wrong=4)
    rig.engine.handle(command("a", max_tokens=60))
    for _ in range(steps):
        rig.step()
    (event,) = abort(rig)
    assert isinstance(event, FinishedEvent)
    assert event.finish_reason == "cancelled"
    assert event.usage.completion_tokens >= steps
    rig.check_baseline()
    assert not rig.engine.has_work
    assert abort(rig) == [], "unknown ids are ignored"


def test_trap_d9_abort_in_the_queue_and_between_chunks():
    rig = make_rig(max_batched_tokens=4)
    rig.engine.handle(command("long", V.split("a long prompt of tokens"), max_tokens=5))
    assert any(isinstance(e, ProgressEvent) for e in rig.step())
    rig.engine.handle(command("a", max_tokens=5))
    assert abort(rig)[-1].finish_reason == "cancelled"
    assert abort(rig, "long")[-1].finish_reason == "cancelled"
    rig.check_baseline()


def test_trap_d6_abort_before_the_first_step():
    rig = make_rig()
    rig.engine.handle(command("a"))
    assert [type(e) for e in abort(rig)] == [FinishedEvent]
    rig.check_baseline()


def test_trap_d6_abort_while_compiling():
    rig = make_rig()
    rig.compiler.gate.clear()
    rig.engine.handle(command("a", guided={"choice": ["ab"]}))
    assert [type(e) for e in rig.engine.step()] == [QueuedEvent]
    assert abort(rig)[-1].finish_reason == "cancelled"
    rig.check_baseline()
    rig.compiler.gate.set()
    assert answer(rig.run(command("b", guided={"choice": ["ab"]}))["b"]).text == "ab"


def test_trap_d6_abort_while_preempted():
    rig = make_rig(blocks=10, block_size=4)
    for name in "abc":
        rig.engine.handle(command(name, f"hi{name}", max_tokens=14))
    while not rig.engine.scheduler.num_preemptions:
        rig.step()
    (waiting, *_) = [r.request_id for r in rig.engine.scheduler.waiting if r.num_output_tokens]
    assert abort(rig, waiting)[-1].finish_reason == "cancelled"
    rig.run()


def test_cancelled_answer_shows_what_was_withheld():
    rig = make_rig()
    rig.engine.handle(command("a", max_tokens=60, stop=[chr(c) * 2 for c in range(97, 113)]))
    shown = []
    for _ in range(8):
        shown += [e for e in rig.step() if isinstance(e, DeltaEvent)]
    events = abort(rig)
    ids = [t for e in [*shown, *events] if isinstance(e, DeltaEvent) for t in e.token_ids]
    assert len(ids) == events[-1].usage.completion_tokens


@pytest.mark.parametrize("guided", [{"regex": "("}, {"json_object": True}])
def test_trap_b7_c17_a_broken_grammar_fails_alone(guided):
    rig = make_rig(drafts=2)
    events = rig.run(command("bad", guided=guided), command("good", guided={"choice": ["ab"]}), command("plain"))
    failed = events["bad"][-1]
    assert isinstance(failed, FailedEvent)
    assert "secret" not in failed.message
    assert answer(events["good"]).text == "ab"
    assert answer(events["plain"]).reason == "length"


def test_trap_c17_a_compiler_that_hangs_does_not_hold_its_request_for_ever():
    rig = make_rig(compile_timeout=0.05)
    rig.compiler.gate.clear()
    events = rig.run(command("a", guided={"choice": ["ab"]}), steps=100_000)
    assert events["a"][-1].code == "invalid_grammar"
    rig.compiler.gate.set()


def test_guided_without_a_compiler_is_refused():
    rig = make_rig()
    rig.engine._compiling = None
    event = only(rig.run(command("a", guided={"choice": ["ab"]})))
    assert (event.code, event.param) == ("invalid_request", "guided")


@pytest.mark.parametrize("method", ["fill", "accept"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_trap_b7_a_matcher_that_breaks_fails_its_request_alone(method, drafts, monkeypatch):
    calls = iter(range(100))
    real = getattr(ChoiceMatcher, method)

    def broken(self, *args):
        if next(calls) == 2:
            raise ValueError("secret text")
        return real(self, *args)

    monkeypatch.setattr(ChoiceMatcher, method, broken)
    rig = make_rig(drafts=drafts)
    events = rig.run(command("bad", guided={"choice": ["ab ab ab ab ab"]}), command("plain", max_tokens=10))
    assert isinstance(events["bad"][-1], FailedEvent)
    assert "secret" not in events["bad"][-1].message
    assert answer(events["plain"]).token_ids == answer(make_rig().run(command("p", max_tokens=10))["p"]).token_ids


def test_trap_g5_logs_hold_no_text(caplog):
    caplog.set_level(logging.DEBUG)
    rig = make_rig()
    secret = "hidden words"
    rig.executor.fail_next = RuntimeError(f"{secret} in a message")
    rig.run(command("a", secret), command("b", secret, guided={"json_object": secret}))
    rig.run(command("c", secret, guided={"choice": [secret]}), command("d", secret, stop=secret))
    assert caplog.records
    for record in caplog.records:
        assert secret not in record.getMessage()
        assert record.exc_info is None


def test_describe_names_places_and_no_message():
    try:
        raise KeyError("secret")
    except KeyError as error:
        text = describe(error)
    assert "KeyError in test_describe_names_places_and_no_message" in text
    assert "secret" not in text


def test_failed_events_become_their_exceptions_again():
    event = failed_event("a", EngineDeadError("gone"))
    error = error_of(event)
    assert type(error) is EngineDeadError
    assert (error.message, error.code, error.status) == ("gone", "engine_died", 503)
    custom = error_of(FailedEvent("a", "no_legal_token", "m", "p", 400))
    assert (custom.code, custom.param, custom.status) == ("no_legal_token", "p", 400)


def test_close_frees_everything_and_is_idempotent():
    rig = make_rig()
    rig.compiler.gate.clear()
    rig.engine.handle(command("a", max_tokens=50))
    rig.engine.handle(command("b", guided={"choice": ["ab"]}))
    rig.step()
    rig.engine.close()
    rig.engine.close()
    rig.compiler.gate.set()
    assert rig.executor.closed
    rig.check_baseline()
    deadline = time.monotonic() + 10
    while any(t.is_alive() for t in rig.engine._compiling._threads):
        assert time.monotonic() < deadline
