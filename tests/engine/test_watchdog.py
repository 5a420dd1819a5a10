"""The watchdog: what counts as progress, and whose silence is a stall."""

from __future__ import annotations

import logging

import pytest

from specserve.core.messages import EngineStats, FailedEvent, FinishedEvent, QueuedEvent
from specserve.core.plan import SampledTokens, ScheduledRequest, StepPlan, StepResult
from specserve.engine.loop import run_loop
from specserve.engine.watchdog import Alarm, ChildWatch, Watchdog
from specserve.sched.policy import WaitingQueue
from tests.fakes.engines import answer, command, make_rig


class Clock:
    """Moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dog(clock):
    return Watchdog(clock)


def alarm_of(watch, requests=12):
    return Alarm(30.0, watch.lull, lambda: requests)


def plan_of(*rows):
    """A plan of (request id, start, number of tokens)."""
    requests = tuple(ScheduledRequest(name, 0, (1,) * n, start, (0,), 0) for name, start, n in rows)
    return StepPlan(1, requests)


def result_of(plan, tokens=()):
    return StepResult(plan.step, tuple(SampledTokens(r.request_id, r.epoch, tokens) for r in plan.requests))


def stats_of(rested=0.0, idle=False):
    return EngineStats(counters={"engine_no_progress_seconds": rested, "engine_stalled": float(idle)})


def test_trap_d2_turns_that_plan_nothing_become_a_stall(clock, dog):
    alarm = alarm_of(dog)
    for _ in range(30):
        dog.turn()
        dog.scheduled(None)
        dog.wait(0.01)
        assert alarm.reason() is None
        clock.now += 1
    clock.now += 1
    assert alarm.reason() == "12 requests wait and no step has run for 31 s"
    assert dog.gauges() == {"engine_stalled": 1, "engine_no_progress_seconds": 31}
    plan = plan_of(("a", 0, 4))
    dog.scheduled(plan)
    assert alarm.reason() is not None, "a plan alone is no progress"
    dog.stepped(plan, result_of(plan))
    assert alarm.reason() is None
    assert dog.gauges() == {"engine_stalled": 0, "engine_no_progress_seconds": 0}


def test_trap_d2_a_turn_that_does_not_end_becomes_a_stall(clock, dog):
    alarm = alarm_of(dog, requests=1)
    dog.turn()
    dog.scheduled(plan_of(("a", 0, 4)))
    clock.now += 29
    assert alarm.reason() is None
    clock.now += 2
    assert alarm.reason() == "1 request waits and one step has run for 31 s"


def test_trap_d2_steps_that_compute_the_same_again_become_a_stall(clock, dog):
    alarm = alarm_of(dog)

    def step(plan, tokens=()):
        clock.now += 10
        dog.turn()
        dog.scheduled(plan)
        dog.stepped(plan, result_of(plan, tokens))
        dog.wait(0.0)

    first, second = plan_of(("a", 0, 64)), plan_of(("b", 0, 64))
    step(first)
    step(second)
    for plan in (first, second, plan_of(("a", 16, 32))):  # each computes what the other one's turn threw away
        assert alarm.reason() is None
        step(plan)
    assert alarm.reason() == "12 requests wait and none has advanced for 30 s"
    step(plan_of(("a", 64, 1)))
    assert alarm.reason() is None, "one position further is progress"
    for _ in range(3):
        step(first, tokens=(7,))
        assert alarm.reason() is None, "and so is a token, from wherever it was computed"
    step(second)
    for _ in range(2):
        step(second)
    assert alarm.reason() is None, "after a token every prompt counts from its beginning"


def test_an_idle_loop_owes_nothing(clock, dog):
    alarm = alarm_of(dog)
    plan = plan_of(("a", 0, 4))
    dog.turn()
    dog.scheduled(plan)
    dog.stepped(plan, result_of(plan, (1,)))
    dog.wait(None)
    clock.now += 3600
    assert dog.lull() is None
    dog.turn()
    clock.now += 29
    assert alarm.reason() is None, "the hour of waiting does not count"
    dog.rest()
    clock.now += 3600
    assert alarm.reason() is None
    dog.turn()
    clock.now += 31
    assert alarm_of(dog, requests=0).reason() is None, "a stall needs somebody who waits"
    assert alarm.reason() is not None


def test_a_silent_child_is_stalled_only_while_it_owes_something(clock):
    watch = ChildWatch(clock)
    alarm = alarm_of(watch)
    watch.heard(stats_of())
    watch.owes(False)
    clock.now += 3600
    assert alarm.reason() is None
    assert alarm.due() is None
    watch.owes(True)
    assert alarm.due() == 30
    for _ in range(100):  # it turns, so it speaks: grammars are compiled, or tokens come
        clock.now += 29
        assert alarm.reason() is None
        watch.heard(stats_of())
        watch.owes(True)
    clock.now += 12
    watch.owes(True)
    clock.now += 19
    assert alarm.reason() == "12 requests wait and the engine process has said nothing for 31 s"
    assert alarm.due() is None, "only its word can change that"
    watch.heard(stats_of())
    assert alarm.reason() is None
    clock.now += 40
    watch.owes(False)
    assert alarm.reason() is None


@pytest.mark.parametrize(("idle", "what"), [(True, "no step has run"), (False, "none has advanced")])
def test_a_child_that_speaks_tells_of_its_own_stall(clock, idle, what):
    watch = ChildWatch(clock)
    alarm = alarm_of(watch)
    watch.owes(True)
    for seconds in range(31):
        watch.heard(stats_of(seconds, idle))
        watch.owes(True)
        assert (alarm.reason() is None) == (seconds < 30)
        clock.now += 1
    assert alarm.reason() == f"12 requests wait and {what} for 31 s"


def test_a_stall_is_logged_once_and_its_end_once(clock, dog, caplog):
    alarm = alarm_of(dog)
    dog.turn()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += 20
            alarm.reason()
            alarm.mark(EngineStats())
        dog.rest()
        for _ in range(3):
            alarm.reason()
    assert [r.getMessage() for r in caplog.records] == [
        "the engine is stalled: 12 requests wait and one step has run for 40 s",
        "the engine is no longer stalled",
    ]


def test_the_verdict_replaces_the_engines_own_word_in_the_stats(clock, dog):
    alarm = alarm_of(dog)
    dog.turn()
    dog.scheduled(None)
    clock.now += 5
    stats = EngineStats(running=3, counters={**dog.gauges(), "engine_steps_total": 7})
    expected = {"engine_stalled": 0, "engine_no_progress_seconds": 5, "engine_steps_total": 7}
    assert alarm.mark(stats) == EngineStats(running=3, counters=expected)
    clock.now += 30
    assert alarm.mark(stats).counters == {**expected, "engine_stalled": 1, "engine_no_progress_seconds": 35}


# The engine's marks.


def turn(rig):
    """What the loop does, once."""
    rig.engine.watchdog.turn()
    events = rig.step()
    rig.engine.watchdog.wait(rig.engine.pause())
    return events


def test_steps_of_the_engine_are_progress(clock):
    rig = make_rig(max_batched_tokens=4)
    rig.engine.watchdog = Watchdog(clock)
    rig.engine.handle(command("a", "hi" * 12, max_tokens=5))  # several chunks of prompt, then tokens
    while rig.engine.has_work:
        turn(rig)
        lull = rig.engine.watchdog.lull()
        assert lull is None or lull.seconds == 0
        clock.now += 20
    assert rig.engine.watchdog.lull() is None


def test_waiting_for_a_grammar_is_no_stall(clock):
    rig = make_rig()
    rig.engine.watchdog = Watchdog(clock)
    rig.compiler.gate.clear()
    try:
        rig.engine.handle(command("g", guided={"choice": ["ab"]}))
        assert turn(rig) == [QueuedEvent("g")]
        clock.now += 3600
        assert rig.engine.watchdog.lull() is None
        turn(rig)
        assert rig.engine.watchdog.lull() is None
    finally:
        rig.compiler.gate.set()
    assert answer([QueuedEvent("g"), *rig.run()["g"]]).text == "ab"


def test_trap_d2_a_stall_ends_with_the_last_request_that_waits(clock, monkeypatch):
    rig = make_rig()
    rig.engine.watchdog = Watchdog(clock)
    monkeypatch.setattr(WaitingQueue, "admit", lambda queue, attempt: None)
    rig.engine.handle(command("a", max_tokens=4))
    turn(rig)
    clock.now += 40
    turn(rig)
    assert rig.engine.watchdog.lull().seconds == 40
    assert rig.engine.stats().counters["engine_stalled"] == 1
    rig.engine._abort("a")
    turn(rig)
    assert rig.engine.watchdog.lull() is None
    assert rig.engine.stats().counters["engine_stalled"] == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_that_waits_for_commands_owes_nothing(clock, monkeypatch, fails):
    rig = make_rig()
    rig.engine.watchdog = Watchdog(clock)
    if fails:
        monkeypatch.setattr(rig.engine.scheduler.__class__, "schedule", lambda scheduler: 1 / 0)
    pauses, delivered = [], []

    def receive(pause):
        pauses.append(pause)
        if pause is None:
            clock.now += 3600
            assert rig.engine.watchdog.lull() is None
            return None if len(pauses) > 1 else [command("a", max_tokens=3)]
        return []

    run_loop(rig.engine, receive, delivered.extend)
    assert pauses[0] is pauses[-1] is None
    assert len(pauses) > 1
    assert isinstance(delivered[-1], FailedEvent if fails else FinishedEvent)
