from __future__ import annotations

import pytest

from specserve.core.errors import EngineDeadError, InvalidRequestError
from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
)
from specserve.core.sampling import SamplingParams
from specserve.engine.checks import EngineLimits
from specserve.engine.intake import take_in
from specserve.engine.metrics import Metrics
from specserve.engine.registry import Registry
from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from tests.fakes.vocab import ToyVocabulary

V = ToyVocabulary()


class Desk:
    """A registry and what it dropped."""

    def __init__(self):
        self.dropped = []
        self.metrics = Metrics()
        self.registry = Registry(self.metrics, V.token_bytes, "invariant", lambda live: self.dropped.append(live))

    def take(self, name="a", **params):
        command = GenerateCommand(name, tuple(V.encode("hi")), SamplingParams(seed=3, **params))
        taken = take_in(command, EngineLimits(64), V, KVManager(BlockPool(250, 4)), 0)
        self.registry.add(taken.lives, taken.group)
        return taken

    def fetch(self):
        return self.registry.fetch()


def test_a_request_of_one_has_its_own_id():
    desk = Desk()
    taken = desk.take()
    assert taken.group is None
    assert list(desk.registry) == ["a"]
    assert desk.registry.of("a") == [taken.first]
    desk.registry.finish(taken.first, "stop")
    (event,) = desk.fetch()
    assert isinstance(event, FinishedEvent)
    assert desk.dropped == [taken.first]
    assert not desk.registry.taken("a")


def test_a_group_is_known_by_its_owner_and_its_members_by_theirs():
    desk = Desk()
    taken = desk.take(n=3)
    assert list(desk.registry) == ["a#0", "a#1", "a#2"]
    assert desk.registry.of("a") == list(taken.lives)
    assert desk.registry.of("a#1") == [], "owners cancel whole requests"
    assert desk.registry.of("unknown") == []
    assert all(map(desk.registry.taken, ["a", "a#0", "a#2"]))
    assert not desk.registry.taken("a#3")


def test_events_of_members_reach_the_owner():
    desk = Desk()
    first, second = desk.take(n=2).lives
    registry = desk.registry
    for live in (first, second, first):
        registry.queued(live)
    for live in (first, second):
        registry.started(live)
    registry.publish([ProgressEvent("a#0", 1, 2), ProgressEvent("a#1", 1, 2)])
    registry.publish([DeltaEvent("a#1", (5,), "x"), DeltaEvent("a#0", (6,), "y"), DeltaEvent("other", (7,), "z")])
    assert desk.fetch() == [
        QueuedEvent("a"),
        StartedEvent("a", 3, 2, 0),
        ProgressEvent("a", 1, 2),
        DeltaEvent("a", (5,), "x", index=1),
        DeltaEvent("a", (6,), "y", index=0),
        DeltaEvent("other", (7,), "z"),
    ]
    assert desk.fetch() == []
    assert desk.metrics.snapshot()["prefix_cache_queries_total"] == 2


def test_nothing_is_queued_once_a_member_has_started():
    desk = Desk()
    first, second = desk.take(n=2).lives
    desk.registry.started(first)
    desk.registry.queued(second)
    assert [type(e) for e in desk.fetch()] == [StartedEvent]


def test_a_group_ends_with_its_last_member():
    desk = Desk()
    first, second = desk.take(n=2).lives
    desk.registry.finish(second, "length")
    assert desk.fetch() == [ChoiceFinishedEvent("a", 1, "length", second.request.seed)]
    assert desk.registry.taken("a")
    desk.registry.finish(first, "stop")
    events = desk.fetch()
    assert [type(e) for e in events] == [ChoiceFinishedEvent, FinishedEvent]
    assert events[-1].finish_reason == "length"
    assert not any(map(desk.registry.taken, ["a", "a#0", "a#1"]))
    assert desk.dropped == [second, first]
    assert desk.metrics.snapshot()['request_success_total{finished_reason="length"}'] == 1


@pytest.mark.parametrize("params", [{"n": 3}, {"n": 2, "best_of": 3}, {"beam_width": 3}])
def test_one_fault_ends_the_whole_group_once(params):
    desk = Desk()
    taken = desk.take(**params)
    for live in taken.lives:
        desk.registry.fail(live, InvalidRequestError("bad", param="p"))
    (event,) = desk.fetch()
    assert isinstance(event, FailedEvent)
    assert (event.request_id, event.param, event.usage.prompt_tokens) == ("a", "p", 2)
    assert sorted(live.request_id for live in desk.dropped) == sorted(live.request_id for live in taken.lives)
    assert len(desk.registry) == 0
    assert not desk.registry.taken("a")


@pytest.mark.parametrize("params", [{"n": 3}, {"n": 2, "best_of": 3}, {"beam_width": 3}])
def test_cancelling_all_members_gives_one_end(params):
    desk = Desk()
    taken = desk.take(**params)
    for live in desk.registry.of("a"):
        desk.registry.end_early(live, "cancelled")
    (event,) = desk.fetch()
    assert isinstance(event, FinishedEvent)
    assert event.finish_reason == "cancelled"
    assert len(desk.dropped) == len(taken.lives)
    assert not desk.registry.taken("a")


def test_a_cancelled_choice_shows_what_was_withheld():
    desk = Desk()
    first, second = desk.take(n=2, stop="STOP").lives
    first.judge.judge([V.id("ST")])
    for live in (first, second):
        desk.registry.end_early(live, "cancelled")
    delta, end = desk.fetch()
    assert (delta.request_id, delta.text, delta.index) == ("a", "ST", 0)
    assert end.usage.completion_tokens == 1


def test_the_usage_of_a_failed_group_counts_those_that_had_ended():
    desk = Desk()
    first, second = desk.take(n=2).lives
    first.judge.judge(V.split("abc"))
    second.judge.judge(V.split("de"))
    desk.registry.finish(first, "stop")
    desk.registry.fail(second, EngineDeadError("gone"))
    event = desk.fetch()[-1]
    assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (2, 5)


def test_a_group_may_end_with_members_alive():
    desk = Desk()
    taken = desk.take(beam_width=2)
    usage = taken.group.usage()
    desk.registry.finish_group(taken.group, [FinishedEvent("a", "stop", usage, 3)])
    assert [type(e) for e in desk.fetch()] == [FinishedEvent]
    assert desk.dropped == list(taken.lives)
    assert not desk.registry.taken("a")
