"""Masks are filled beside the forward, and what comes out is as if they had been filled after it."""

from __future__ import annotations

import threading

import pytest

from specserve.core.messages import FailedEvent
from specserve.engine import masking
from tests.fakes.engines import answer, command, make_rig
from tests.fakes.grammar import ChoiceMatcher

CHOICES = ["hello world", "hello there", "日本語"]
PATIENCE = 30.0  # seconds until a wait counts as one for ever


@pytest.fixture
def beside(monkeypatch):
    """Even the first mask is worth a thread."""
    monkeypatch.setattr(masking, "WORTH", 0.0)


def guided(name, seed=1, **options):
    params = {"guided": {"choice": CHOICES}, "temperature": 1.0, "seed": seed, "max_tokens": 60, **options}
    return command(name, **params)


@pytest.mark.usefixtures("beside")
def test_a_forward_that_waits_for_the_masks_ends(monkeypatch):
    rig = make_rig()
    filled, threads = threading.Event(), set()
    fill, forward = ChoiceMatcher.fill, rig.executor.forward

    def watched(self, *arguments):
        fill(self, *arguments)
        threads.add(threading.current_thread())
        filled.set()

    def waiting(plan):
        if any(r.num_logits for r in plan.requests):
            assert filled.wait(PATIENCE), "nobody fills masks while the forward runs"
            filled.clear()
        forward(plan)

    monkeypatch.setattr(ChoiceMatcher, "fill", watched)
    monkeypatch.setattr(rig.executor, "forward", waiting)
    assert answer(rig.run(guided("a"))["a"]).text in CHOICES
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    rig.engine.close()
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("drafts", [0, 4])
def test_answers_are_those_without_the_thread(monkeypatch, drafts):
    commands = [guided(f"r{seed}", seed) for seed in range(6)] + [command("plain", max_tokens=20, seed=5)]
    monkeypatch.setattr(masking, "WORTH", float("inf"))
    expected = make_rig(drafts=drafts, wrong=3).run(*commands)
    monkeypatch.setattr(masking, "WORTH", 0.0)
    assert make_rig(drafts=drafts, wrong=3).run(*commands) == expected


@pytest.mark.usefixtures("beside")
def test_a_forward_that_fails_waits_for_the_masks(monkeypatch):
    rig = make_rig()
    begun, go_on, ended = threading.Event(), threading.Event(), []
    fill, forward = ChoiceMatcher.fill, rig.executor.forward

    def slow(self, *arguments):
        begun.set()
        assert go_on.wait(PATIENCE)
        fill(self, *arguments)
        ended.append(True)

    def failing(plan):
        monkeypatch.setattr(rig.executor, "forward", forward)
        assert begun.wait(PATIENCE)
        threading.Timer(0.05, go_on.set).start()
        raise RuntimeError("broken")

    fail_plan = rig.engine._fail_plan
    seen = []
    monkeypatch.setattr(rig.engine, "_fail_plan", lambda *a: seen.append(list(ended)) or fail_plan(*a))
    monkeypatch.setattr(ChoiceMatcher, "fill", slow)
    monkeypatch.setattr(rig.executor, "forward", failing)
    events = rig.run(guided("a"))["a"]
    assert [type(event) for event in events].count(FailedEvent) == 1
    assert seen == [[True]], "nothing is taken down while its masks are being filled"
    assert answer(rig.run(guided("b"))["b"]).text in CHOICES


@pytest.mark.usefixtures("beside")
def test_a_grammar_state_that_fails_takes_its_request_alone(monkeypatch):
    rig = make_rig()
    fill = ChoiceMatcher.fill
    first = []

    def broken(self, *arguments):
        if not first or first[0] is self:
            first[:] = [self]
            raise RuntimeError("broken")
        fill(self, *arguments)

    monkeypatch.setattr(ChoiceMatcher, "fill", broken)
    events = rig.run(guided("a"), guided("b", 2))
    ends = [type(events[name][-1]) is FailedEvent for name in ("a", "b")]
    assert sorted(ends) == [False, True]


def test_few_masks_are_not_worth_a_thread(monkeypatch):
    monkeypatch.setattr(masking, "WORTH", 10.0)
    rig = make_rig()
    assert answer(rig.run(guided("a"))["a"]).text in CHOICES
    assert rig.engine._masks._thread is None
