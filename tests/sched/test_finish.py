"""Ending requests in every state, between any two calls; plans that are abandoned."""

import pytest

from specserve.core.request import Status
from specserve.core.tree import EMPTY_TREE
from tests.fakes.sched import Bench, draft_for, status_of
from tests.fakes.worker import expected_tokens


def ended(bench, request):
    assert bench.scheduler.finish(request.request_id) is request
    assert request.status is Status.FINISHED
    assert request.kv is None
    bench.scheduler.check()
    assert bench.scheduler.get(request.request_id) is None
    assert bench.scheduler.finish(request.request_id) is None


def bystander(bench):
    other = bench.add("other", [9, 9, 9], 6)
    bench.step()
    return other


@pytest.mark.parametrize("state", ["waiting", "compiling", "prefill", "decode", "drafted", "preempted"])
def test_trap_d6_abort_in_every_state(state):
    bench = Bench(blocks=6, size=4, max_batched_tokens=8)
    other = bystander(bench)
    status = Status.COMPILING if state == "compiling" else Status.WAITING
    request = bench.add("a", list(range(12)), 8, status=status)
    if state in ("prefill", "decode", "drafted", "preempted"):
        bench.step()
    if state in ("decode", "drafted"):
        bench.step()
        assert request.ready_to_draft
    if state == "drafted":
        request.draft = draft_for(request, 2, 2)
    if state == "preempted":
        bench.scheduler.preempt(request)
        assert status_of(request) is Status.PREEMPTED
    ended(bench, request)
    bench.steps()
    assert other.token_ids == expected_tokens([9, 9, 9], 6)
    assert bench.kv.baseline()
    bench.add("last", [1], 1)
    assert "a" not in {i for i in bench.worker.states if i != "other"} or "a" in bench.plan().removed


def test_trap_d9_cancel_during_a_long_prefill_takes_effect_between_chunks():
    bench = Bench(max_batched_tokens=4)
    request = bench.add("a", list(range(40)))
    for _ in range(3):
        bench.step()
    assert request.num_computed == 12
    ended(bench, request)
    assert bench.plan() is None
    assert bench.kv.baseline()


def test_trap_d9_cancel_in_the_queue():
    bench = Bench(max_running=1)
    bench.add("a", [1], 3)
    waiting = bench.add("b", [2], 3)
    bench.step()
    ended(bench, waiting)
    bench.steps()
    assert bench.kv.baseline()


def test_ending_while_the_plan_is_in_flight_keeps_its_blocks_until_it_is_committed():
    bench = Bench(blocks=4, size=4)
    request = bench.add("a", [1, 2, 3, 4, 5], 8)
    plan = bench.plan()
    used = bench.kv.target.num_used
    ids = list(plan.requests[0].block_ids)
    ended(bench, request)
    assert bench.kv.target.num_used == used
    assert list(plan.requests[0].block_ids) == ids
    bench.commit(plan, bench.worker.run(plan))
    assert request.token_ids == [1, 2, 3, 4, 5], "the result was dropped"
    assert bench.kv.baseline()
    assert bench.kv.target.num_published == 0
    bench.add("b", [1], 1)
    assert bench.plan().removed == ("a",)


def test_a_copy_of_a_request_that_ended_in_flight_keeps_both_ends():
    bench = Bench(blocks=4, size=4, prefix_cache=False)
    request = bench.add("a", [1, 2, 3, 4, 5], 8)
    bench.step()
    fork = bench.kv.fork(request.kv)
    plan = bench.plan()
    (copy,) = plan.copies
    bench.kv.release(fork)
    ended(bench, request)
    assert bench.kv.target.refs(copy.src) == bench.kv.target.refs(copy.dst) == 1
    bench.commit(plan, bench.worker.run(plan))
    assert bench.kv.baseline()


def test_the_same_id_again_while_the_old_plan_is_in_flight():
    bench = Bench()
    first = bench.add("a", [1, 2], 4)
    plan = bench.plan()
    bench.scheduler.finish("a")
    second = bench.add("a", [3, 4], 4)
    bench.commit(plan, bench.worker.run(plan))
    assert (first.num_output_tokens, second.num_output_tokens) == (0, 0)
    plan = bench.plan()
    assert [new.token_ids for new in plan.added] == [(3, 4)]
    assert plan.removed == (), "the new state replaces the old one"
    bench.commit(plan, bench.worker.run(plan))
    bench.steps()
    assert second.token_ids == expected_tokens([3, 4], 4)


def test_an_abandoned_plan_leaves_no_trace():
    bench = Bench(blocks=4, size=4)
    request = bench.add("a", [1, 2, 3, 4, 5], 4)
    plan = bench.plan()
    bench.scheduler.abandon(plan)
    bench.scheduler.check()
    assert bench.kv.target.num_used == 0
    again = bench.plan()
    assert again.added == plan.added, "the worker may not have seen it"
    assert again.requests[0].token_ids == plan.requests[0].token_ids
    bench.commit(again, bench.worker.run(again))
    bench.steps()
    assert request.token_ids == expected_tokens([1, 2, 3, 4, 5], 4)
    assert bench.kv.baseline()


def test_an_abandoned_plan_undoes_copies_and_repeats_removals():
    bench = Bench(blocks=6, size=4)
    gone = bench.add("gone", [7], 2)
    request = bench.add("a", [1, 2, 3, 4, 5], 4)
    bench.step()
    bench.scheduler.finish(gone.request_id)
    fork = bench.kv.fork(request.kv)
    request.draft = draft_for(request, 2)
    plan = bench.plan()
    assert plan.copies
    assert plan.removed == ("gone",)
    bench.scheduler.abandon(plan)
    bench.scheduler.check()
    assert request.draft is EMPTY_TREE
    assert request.kv.target.block_ids == fork.target.block_ids
    again = bench.plan()
    assert again.removed == ("gone",)
    assert again.added == ()
    bench.kv.release(fork)
    bench.commit(again, bench.worker.run(again))
    bench.steps()
    assert request.token_ids == expected_tokens([1, 2, 3, 4, 5], 4)
    with pytest.raises(ValueError, match="not in flight"):
        bench.scheduler.abandon(again)


def test_a_request_that_ends_in_an_abandoned_plan_is_released():
    bench = Bench()
    bench.add("a", [1, 2], 4)
    plan = bench.plan()
    bench.scheduler.finish("a")
    bench.scheduler.abandon(plan)
    bench.scheduler.check()
    assert bench.kv.baseline()


# Families


@pytest.mark.parametrize("flight", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_trap_d6_abort_of_one_choice_leaves_the_others_as_they_are(steps, which, flight):
    """Waiting, held, in the prompt, forked."""
    bench = Bench(blocks=12, size=4, max_batched_tokens=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    members = bench.add_choices("a", 3, prompt, 4)
    for _ in range(steps):
        bench.step()
    plan = bench.plan() if flight else None
    ended(bench, members[which])
    if plan is not None:
        bench.commit(plan, bench.worker.run(plan))
    bench.steps()
    for i, member in enumerate(members):
        if i != which:
            assert member.token_ids == expected_tokens(prompt, 4, salt=i + 1)
    assert bench.kv.baseline()


@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
@pytest.mark.parametrize("flight", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_trap_d6_abort_of_a_search_in_every_state(steps, flight, mode):
    """Waiting, in the prompt, running, parked beside others that wait, preempted, swapped."""
    bench = Bench(blocks=20, size=4, max_batched_tokens=8, host=20, mode=mode or "recompute")
    other = bystander(bench)
    search = bench.add_search("s", 3, list(range(12)), 9)
    for _ in range(steps):
        bench.step()
    first = next(iter(search.beams.values()))
    if mode is not None and first.status is Status.RUNNING:
        bench.scheduler.preempt(first)
        bench.step()
    plan = bench.plan() if flight else None
    for beam in list(search.beams.values()):
        ended(bench, beam)
        search.forget(beam)
    bench.searches.remove(search)
    if plan is not None:
        bench.commit(plan, bench.worker.run(plan))
    bench.steps()
    assert other.token_ids == expected_tokens([9, 9, 9], 6)
    assert bench.kv.baseline()
    assert bench.kv.host.num_used == 0


def test_trap_d6_abort_of_a_parked_beam_lets_the_others_go_on():
    bench = Bench(size=4, max_batched_tokens=16, mode="recompute")
    search = bench.add_search("s", 3, list(range(10)), 6)
    bench.step()
    bench.step()
    first = next(iter(search.beams.values()))
    bench.scheduler.preempt(first)
    bench.step()
    assert first.parked
    ended(bench, first)
    search.forget(first)
    bench.steps()
    assert len(search.results) == 3
    assert bench.kv.baseline()


def test_trap_d9_cancel_of_a_family_during_its_prefill():
    bench = Bench(max_batched_tokens=4)
    members = bench.add_choices("a", 4, list(range(40)), 4)
    for _ in range(3):
        bench.step()
    for member in members:
        ended(bench, member)
    assert bench.plan() is None
    assert bench.kv.baseline()
    assert not bench.scheduler.has_work


def test_a_forked_beam_that_ends_in_flight_keeps_both_ends_of_its_copy():
    bench = Bench(blocks=8, size=4, prefix_cache=False)
    search = bench.add_search("s", 2, [1, 2, 3, 4, 5], 4)
    bench.step()
    plan = bench.plan()
    assert len(plan.copies) == 2
    gone = search.beams["s.1"]
    ended(bench, gone)
    search.forget(gone)
    for copy in plan.copies:
        assert bench.kv.target.refs(copy.src) > 0
        assert bench.kv.target.refs(copy.dst) == 1
    bench.commit(plan, bench.worker.run(plan))
    bench.steps()
    assert bench.kv.baseline()
