"""Beam searches that are cancelled, run out of tokens, or break."""

from __future__ import annotations

import pytest

from specserve.core.messages import AbortCommand, FailedEvent, StartedEvent
from specserve.engine.judge import Judge
from specserve.engine.settle import settle
from tests.engine.test_beam_search import same
from tests.engine.test_beams import LONG, PEAKED, PROMPT, beams, expected, found, scaled
from tests.fakes.engines import VOCABULARY, answer, command, make_rig, several
from tests.fakes.grammar import ChoiceMatcher

V = VOCABULARY


def abort_after(rig, steps, name="a"):
    events = []
    for _ in range(steps):
        events += rig.step()
    rig.engine.handle(AbortCommand(name))
    events += rig.step()
    return [e for e in events if e.request_id == name]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("drafts", [0, 3])
def test_trap_d6_abort_in_any_step(steps, drafts):
    rig = make_rig(PEAKED, drafts=drafts, max_batched_tokens=5)
    rig.engine.handle(beams(**LONG, speculation=bool(drafts)))
    got = several(abort_after(rig, steps))
    assert got.end.finish_reason == "cancelled"
    assert not got.choices, "no hypothesis of a cancelled search is shown"
    assert got.end.usage.prompt_tokens == len(PROMPT)
    rig.check_baseline()
    assert not rig.engine.has_work


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_trap_d6_abort_while_preempted(mode):
    rig = make_rig(PEAKED, host=64, preemption=mode)
    rig.engine.handle(beams(**LONG))
    for _ in range(5):
        rig.step()
    rig.engine.scheduler.preempt(rig.engine.scheduler.running[0])
    assert not rig.engine.scheduler.running
    assert several(abort_after(rig, 0)).end.finish_reason == "cancelled"
    same(found(rig.run(beams("b", **LONG))["b"]), expected(PEAKED, **LONG))


def test_no_token_left_fails_the_request_once_and_alone():
    rig = make_rig(PEAKED)
    bad = beams("a", width=3, max_tokens=5, allowed_token_ids=(5,), banned_token_ids=(5,))
    events = rig.run(bad, command("b", max_tokens=5))
    (failed,) = [e for e in events["a"] if not isinstance(e, StartedEvent)]
    assert isinstance(failed, FailedEvent)
    assert (failed.code, failed.status) == ("no_legal_token", 400)
    assert answer(events["b"]).reason == "length"


def test_hypotheses_that_ended_are_the_answer_where_no_other_can_go_on():
    """The grammar leaves two texts; one ends at once, the other comes to a token that is banned."""
    rig = make_rig(scaled(1.0))
    texts = {"choice": ["a", "bx"]}
    events = rig.run(beams(width=4, max_tokens=9, guided=texts, banned_token_ids=tuple(V.split("x"))))["a"]
    (only,) = found(events)
    assert only.tokens == tuple(V.split("a"))


def test_a_dead_end_without_any_hypothesis_fails():
    rig = make_rig(scaled(1.0))
    events = rig.run(beams(width=4, max_tokens=9, guided={"choice": ["bx"]}, banned_token_ids=tuple(V.split("x"))))
    assert events["a"][-1].code == "no_legal_token"


@pytest.mark.parametrize("method", ["fill", "accept", "fork"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_trap_b7_a_matcher_that_breaks_fails_its_search_alone(method, drafts, at, monkeypatch):
    calls = iter(range(1000))
    real = getattr(ChoiceMatcher, method)

    def broken(self, *args):
        if next(calls) == at:
            raise ValueError("secret text")
        return real(self, *args)

    monkeypatch.setattr(ChoiceMatcher, method, broken)
    rig = make_rig(scaled(8.0), drafts=drafts)
    bad = beams("bad", width=3, max_tokens=9, guided={"choice": ["ab ab ab", "abcab"]}, speculation=bool(drafts))
    events = rig.run(bad, beams("good", **LONG))
    failed = several(events["bad"]).end
    assert isinstance(failed, FailedEvent)
    assert "secret" not in failed.message
    same(found(events["good"]), expected(scaled(8.0), **LONG))


def test_a_judge_that_breaks_fails_its_search_alone(monkeypatch):
    real = Judge.judge
    calls = iter(range(1000))

    def broken(self, tokens, logprobs=()):
        if self.budget == 9 and next(calls) == 7:
            raise RuntimeError("secret")
        return real(self, tokens, logprobs)

    monkeypatch.setattr(Judge, "judge", broken)
    rig = make_rig(PEAKED)
    events = rig.run(beams("bad", width=3, max_tokens=9), beams("good", **LONG))
    assert isinstance(several(events["bad"]).end, FailedEvent)
    same(found(events["good"]), expected(PEAKED, **LONG))


@pytest.mark.parametrize("steps", [2, 3, 16])
def test_a_search_that_chose_and_failed_in_one_step_ends_once(steps, monkeypatch):
    """Whether it was about to go on or had its answer."""
    rig = make_rig(PEAKED)
    rig.engine.handle(beams(**LONG))
    whole = len(make_rig(PEAKED).run(beams(**LONG))["a"])
    events = [e for _ in range(min(steps, LONG["max_tokens"]) - 1) for e in rig.step()]
    assert len(events) < whole

    def settle_and_fail(plan, result, lives, broken, token_bytes):
        settled = settle(plan, result, lives, broken, token_bytes)
        settled.failed.append((lives[plan.requests[0].request_id], RuntimeError("secret")))
        return settled

    monkeypatch.setattr("specserve.engine.engine.settle", settle_and_fail)
    events += rig.step()
    got = several(events)
    assert isinstance(got.end, FailedEvent)
    assert not got.choices
    rig.check_baseline()
    assert not rig.engine.has_work


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_trap_e11_a_failed_step_ends_the_search_once(where, steps):
    rig = make_rig(PEAKED, max_batched_tokens=4)
    rig.engine.handle(beams(**LONG))
    events = []
    for _ in range(steps):
        events += rig.step()
    rig.executor.fail_next, rig.executor.fail_in = RuntimeError("gone"), where
    events += rig.step()
    got = several(events)
    assert isinstance(got.end, FailedEvent)
    assert not got.choices
    rig.check_baseline()
    same(found(rig.run(beams("b", **LONG))["b"]), expected(PEAKED, **LONG))
