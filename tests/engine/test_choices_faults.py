"""Requests of several choices that are cancelled, refused, or break: one terminal event, and nothing is kept."""

from __future__ import annotations

import dataclasses

import pytest

from specserve.core.errors import EngineDeadError
from specserve.core.messages import AbortCommand, FailedEvent, FinishedEvent, QueuedEvent, StartedEvent
from specserve.engine.judge import Judge
from tests.engine.test_choices import PROMPT, check, choices
from tests.fakes.engines import VOCABULARY, answer, command, make_rig, several
from tests.fakes.grammar import ChoiceMatcher

V = VOCABULARY
GUIDED = {"choice": ["日本語日本語日本語", "日本日本日本日本 hello", "hello world, hello world, hello"]}


def abort(rig, events, name="a"):
    """Abort and take one step; all events of the request so far."""
    rig.engine.handle(AbortCommand(name))
    after = [e for e in rig.engine.step() if e.request_id == name]
    rig.engine.scheduler.check()
    got = several([*(e for e in events if e.request_id == name), *after])
    assert isinstance(got.end, FinishedEvent)
    assert got.end.finish_reason == "cancelled"
    assert got.end.usage.prompt_tokens == len(PROMPT)
    rig.engine.handle(AbortCommand(name))
    assert not [e for e in rig.engine.step() if e.request_id == name], "unknown ids are ignored"
    return got


def idle(rig):
    """Nothing is left, and the engine goes on as if nothing had been."""
    assert not rig.engine.has_work
    check(rig.run(choices(3, temperature=1.0))["a"], 3, temperature=1.0)


def test_trap_d6_abort_before_the_first_step():
    rig = make_rig()
    rig.engine.handle(choices(4))
    got = abort(rig, [])
    assert got.started is None
    assert not got.choices
    rig.check_baseline()
    idle(rig)


def test_trap_d6_abort_in_the_queue():
    rig = make_rig(max_running=1)
    rig.engine.handle(command("first", max_tokens=30))
    rig.engine.handle(choices(4))
    events = [e for _ in range(3) for e in rig.step() if e.request_id == "a"]
    assert events == [QueuedEvent("a")], "said once for all choices"
    assert abort(rig, events).started is None
    rig.run()


def test_trap_d6_abort_while_compiling():
    rig = make_rig()
    rig.compiler.gate.clear()
    rig.engine.handle(choices(3, guided=GUIDED))
    events = rig.engine.step()
    assert events == [QueuedEvent("a")]
    abort(rig, events)
    rig.check_baseline()
    rig.compiler.gate.set()
    idle(rig)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("guided", [None, GUIDED])
def test_trap_d6_d8_d9_abort_in_prefill_and_while_running(steps, drafts, guided):
    rig = make_rig(max_batched_tokens=8, drafts=drafts, wrong=4)
    rig.engine.handle(choices(4, temperature=1.0, max_tokens=30, guided=guided))
    events = []
    while len(rig.executor.plans) < steps:
        events += rig.step()
    got = abort(rig, events)
    counted = got.end.usage.completion_tokens
    assert counted >= sum(len(c.token_ids) for c in got.choices.values())
    assert (counted == 0) == (steps == 1)
    assert not any(c.end for c in got.choices.values())
    rig.check_baseline()
    idle(rig)


def test_trap_d6_abort_when_some_choices_have_ended():
    rig = make_rig()
    # One choice after the other reaches its end token.
    rig.engine.handle(choices(5, temperature=1.0, max_tokens=60, logit_bias={0: 2.15}))
    events = []
    while not any(c.end for c in _choices(events).values()):
        events += rig.step()
    got = abort(rig, events)
    ended = [c for c in got.choices.values() if c.end]
    assert 0 < len(ended) < 5
    assert all(c.reason == "stop" for c in ended), "what had ended stays as it was"
    rig.check_baseline()
    idle(rig)


def _choices(events):
    return several([*events, FinishedEvent("a", "cancelled", None, 0)]).choices if events else {}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_trap_d6_abort_while_preempted(mode):
    rig = make_rig(blocks=11, block_size=3, host=40, preemption=mode)
    rig.engine.handle(command("first", PROMPT, max_tokens=20))
    rig.engine.handle(choices(4, temperature=1.0, max_tokens=16))
    events = []
    while not rig.engine.scheduler.num_preemptions:
        events += rig.step()
    gone = [r for r in rig.engine.scheduler.waiting if r.num_output_tokens]
    assert gone
    assert all((r.kv is not None) == (mode == "swap") for r in gone)
    abort(rig, events)
    rig.run()


def test_the_text_that_was_withheld_is_shown_with_its_choice():
    rig = make_rig()
    stops = [chr(c) * 2 for c in range(97, 113)]
    ids = V.split("abcdefghijklmnop")
    rig.engine.handle(choices(3, temperature=1.0, max_tokens=60, stop=stops, allowed_token_ids=ids))
    got = abort(rig, [e for _ in range(6) for e in rig.step()])
    shown = sum(len(c.token_ids) for c in got.choices.values())
    ended = sum(c.end is not None for c in got.choices.values())
    assert shown == got.end.usage.completion_tokens - 2 * ended


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_best_of_that_is_cancelled_shows_no_choice(steps):
    rig = make_rig()
    rig.engine.handle(choices(2, best_of=4, temperature=1.0, max_tokens=30, logit_bias={0: 2.15}))
    got = abort(rig, [e for _ in range(steps) for e in rig.step()])
    assert not got.choices
    assert (got.end.usage.completion_tokens > 0) == (steps > 0)
    rig.check_baseline()


def failed_once(events, status=500):
    got = several(events)
    assert isinstance(got.end, FailedEvent), got.end
    assert got.end.status == status
    assert "secret" not in got.end.message
    return got


def test_an_error_of_one_choice_fails_the_request_once():
    rig = make_rig()
    sample = rig.executor.sample

    def one_fails(plan, masks):
        result = sample(plan, masks)
        outputs = [
            o._replace(token_ids=(), logprobs=(), error="nothing is legal") if "#2" in o.request_id else o
            for o in result.outputs
        ]
        return dataclasses.replace(result, outputs=tuple(outputs))

    rig.engine.handle(choices(4, temperature=1.0, max_tokens=20))
    rig.engine.handle(command("b", max_tokens=10))
    events = [e for _ in range(4) for e in rig.step()]
    rig.executor.sample = one_fails
    events += rig.step()
    got = failed_once([e for e in events if e.request_id == "a"], status=400)
    assert got.end.code == "no_legal_token"
    assert got.end.usage.completion_tokens > 4
    events += rig.run()["b"]
    assert answer([e for e in events if e.request_id == "b"]).reason == "length"
    rig.executor.sample = sample
    idle(rig)


@pytest.mark.parametrize("best_of", [None, 4])
def test_two_choices_that_fail_in_one_step_fail_the_request_once(best_of):
    rig = make_rig()
    bad = choices(3, best_of=best_of, allowed_token_ids=(5,), banned_token_ids=(5,))
    events = rig.run(bad, command("b", max_tokens=4))
    assert failed_once(events["a"], status=400).end.code == "no_legal_token"
    assert answer(events["b"]).reason == "length"


@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_a_judge_that_breaks_fails_the_request_once(at, monkeypatch):
    real, calls = Judge.judge, iter(range(1000))

    def broken(self, tokens, logprobs=()):
        if self.budget == 9 and next(calls) == at:
            raise RuntimeError("secret")
        return real(self, tokens, logprobs)

    monkeypatch.setattr(Judge, "judge", broken)
    rig = make_rig()
    events = rig.run(choices(4, temperature=1.0, max_tokens=9), command("b", max_tokens=10))
    failed_once(events["a"])
    assert answer(events["b"]).reason == "length"


@pytest.mark.parametrize("method", ["fill", "accept", "fork"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_trap_b7_a_matcher_that_breaks_fails_the_request_once(method, drafts, at, monkeypatch):
    calls = iter(range(1000))
    real = getattr(ChoiceMatcher, method)

    def broken(self, *args):
        if next(calls) == at:
            raise ValueError("secret text")
        return real(self, *args)

    monkeypatch.setattr(ChoiceMatcher, method, broken)
    rig = make_rig(drafts=drafts)
    events = rig.run(choices(7, guided=GUIDED, max_tokens=30), command("b", max_tokens=10))
    failed_once(events["a"])
    assert answer(events["b"]).reason == "length"


@pytest.mark.parametrize("guided", [{"regex": "("}, {"json_object": True}])
def test_a_grammar_that_cannot_be_compiled_fails_the_request_once(guided):
    rig = make_rig()
    got = failed_once(rig.run(choices(4, guided=guided))["a"], status=400 if "regex" in guided else 500)
    assert got.started is None
    rig.check_baseline()


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_trap_e11_a_failed_step_ends_the_request_once(where, steps, mode):
    rig = make_rig(max_batched_tokens=8, drafts=2, wrong=3, blocks=14, block_size=3, host=40, preemption=mode)
    rig.engine.handle(choices(4, temperature=1.0))
    events = [e for _ in range(steps) for e in rig.step()]
    rig.executor.fail_next, rig.executor.fail_in = RuntimeError("secret"), where
    events += rig.step()
    failed_once(events)
    rig.check_baseline()
    idle(rig)


def test_fail_all_ends_every_request_once():
    rig = make_rig()
    rig.compiler.gate.clear()
    rig.engine.handle(choices(3))
    rig.engine.handle(dataclasses.replace(choices(2, guided=GUIDED), request_id="g"))
    rig.engine.handle(command("b"))
    rig.step()
    events = rig.engine.fail_all(EngineDeadError("gone"))
    assert sorted(e.request_id for e in events if isinstance(e, FailedEvent)) == ["a", "b", "g"]
    rig.check_baseline()
    rig.compiler.gate.set()
    idle(rig)


def test_ids_in_use_are_ignored():
    rig = make_rig()
    events = rig.run(choices(3), choices(2), command("a#1"), command("b"))
    check(events["a"], 3)
    assert answer(events["b"]).reason == "length"
    assert "a#1" not in events, "a member's id is in use too"
    check(rig.run(choices(2))["a"], 2)  # free again


def test_a_queue_too_short_for_all_choices_takes_none():
    rig = make_rig(max_waiting=3)
    (refused,) = rig.run(choices(4))["a"]
    assert (refused.code, refused.status) == ("overloaded", 503)
    check(rig.run(choices(3))["a"], 3)


def test_too_many_grammars_refuse_the_whole_request():
    rig = make_rig(compile_limit=0)
    (refused,) = rig.run(choices(4, guided=GUIDED))["a"]
    assert refused.code == "overloaded"
    rig.check_baseline()


def test_bad_input_is_refused_before_anything_is_queued():
    (refused,) = make_rig().run(choices(4, banned_token_ids=(10**6,)))["a"]
    assert (refused.code, refused.param) == ("invalid_request", "banned_token_ids[0]")


def test_members_are_not_to_be_cancelled_one_by_one():
    rig = make_rig()
    rig.engine.handle(choices(3, temperature=1.0))
    events = rig.step()
    rig.engine.handle(AbortCommand("a#1"))
    events += rig.run()["a"]
    check(events, 3, temperature=1.0)
    assert sum(isinstance(e, StartedEvent) for e in events) == 1
