"""Preemption to the host pool and back, with the same tokens; plans with moves that fail."""

import pytest

from specserve.core.request import Status
from specserve.sched.preempt import Preemption
from tests.fakes.sched import Bench, draft_for, status_of
from tests.fakes.worker import expected_tokens

PROMPT = [1, 2, 3, 4, 5]


def bench_with(*, host=8, mode="swap", **options):
    return Bench(size=4, host=host, mode=mode, **options)


def crowded(**options):
    """Two requests that fit at first and not to their ends."""
    bench = bench_with(blocks=5, **options)
    a, b = bench.add("a", PROMPT, 12), bench.add("b", [6, 7, 8], 12)
    plan = None
    while not bench.scheduler.num_preemptions:
        plan = bench.step()
    return bench, a, b, plan


def hog_all_but(bench, free):
    seq = bench.kv.open([1], "")
    bench.kv.reserve(seq, (bench.kv.target.num_free - free) * bench.kv.block_size)
    return seq


def start_of(plan, request):
    return next(entry.start for entry in plan.requests if entry.request_id == request.request_id)


@pytest.mark.parametrize("cache", [True, False])
def test_the_latest_goes_to_the_host_pool_and_comes_back_with_its_kv(cache):
    bench, a, b, plan = crowded(prefix_cache=cache)
    assert b.status is Status.SWAPPED
    assert (b.epoch, bench.scheduler.num_swapped) == (1, 1)
    assert b.num_computed == b.num_tokens - 1
    assert len(plan.swap_out) == bench.kv.target.blocks_for(b.num_computed)
    assert plan.removed == ("b",)
    computed = b.num_computed
    bench.scheduler.finish("a")
    plan = bench.step()
    assert start_of(plan, b) == computed, "nothing is computed again"
    assert [new.request_id for new in plan.added] == ["b"]
    bench.steps()
    assert b.token_ids == expected_tokens([6, 7, 8], 12)
    assert bench.kv.baseline()
    assert bench.kv.host.num_used == 0
    assert a.kv is None


def test_without_room_in_the_host_pool_the_latest_is_computed_again():
    bench, _, b, plan = crowded(host=1)
    assert b.status is Status.PREEMPTED
    assert plan.swap_out == ()
    assert bench.scheduler.num_swapped == 0
    bench.steps()
    assert b.token_ids == expected_tokens([6, 7, 8], 12)


def test_recompute_never_swaps():
    _, _, b, _ = crowded(mode="recompute")
    assert b.status is Status.PREEMPTED


@pytest.mark.parametrize(
    ("a_block", "a_row", "swapped"),
    [(1e-3, 1e-2, True), (1e-1, 1e-4, False), (None, 1e-4, False), (1e-3, None, False)],
)
def test_auto_takes_what_costs_less_as_measured(a_block, a_row, swapped):
    bench = bench_with(mode="auto", prefix_cache=False)
    request = bench.add("a", PROMPT)
    bench.step()
    bench.preemption.seconds_per_block = a_block
    if a_row is not None:
        bench.scheduler.budget.observe(0, 10, 10 * a_row)
    bench.scheduler.preempt(request)
    assert (request.status is Status.SWAPPED) == swapped


def test_auto_counts_both_ways_and_only_rows_that_are_not_cached_elsewhere():
    bench = bench_with(prefix_cache=True)
    request = bench.add("a", PROMPT)
    bench.step()
    seqs = [request.kv]
    policy = Preemption("auto", 1.0)
    assert policy.swaps(bench.kv, seqs, 0.81), "2 blocks there and back against 5 rows"
    assert not policy.swaps(bench.kv, seqs, 0.79)
    other = bench.kv.open(PROMPT, "")
    assert bench.kv.recompute_rows(request.kv) == 1
    assert not policy.swaps(bench.kv, seqs, 3.9), "the first block stays, as another holds it"
    assert policy.swaps(bench.kv, seqs, 4.1)
    bench.kv.release(other)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'never' is not one of auto, swap, recompute"):
        Preemption("never")


def test_the_cost_of_a_move_is_measured_and_one_stall_decides_little():
    policy = Preemption()
    for blocks, seconds in ((0, 1.0), (4, 0.0), (4, float("nan"))):
        policy.observe(blocks, seconds)
        assert policy.seconds_per_block is None
    policy.observe(4, 4e-3)
    assert policy.seconds_per_block == pytest.approx(1e-3)
    policy.observe(1, 100.0)
    assert policy.seconds_per_block == pytest.approx(1e-3 * (1 + 3 / 8))


def test_the_scheduler_teaches_the_policy_what_its_plans_moves_took():
    bench, _, _, plan = crowded()
    bench.scheduler.observe(1.0, 0.5)
    assert bench.preemption.seconds_per_block == pytest.approx(0.5 / len(plan.swap_out))


def test_a_pending_draft_is_dropped_and_draft_kv_goes_along():
    bench = bench_with(draft=8, draft_host=8)
    request = bench.add("a", PROMPT)
    bench.step()
    bench.kv.reserve_draft(request.kv, 7)
    bench.kv.commit_draft(request.kv, request.token_ids, 6)
    bench.kv.write_draft(request.kv, 1)
    request.draft = draft_for(request, 2)
    bench.scheduler.preempt(request)
    assert not request.draft
    plan = bench.plan()
    assert {swap.pool for swap in plan.swap_out} == {swap.pool for swap in plan.swap_in} == {"target", "draft"}
    bench.commit(plan, bench.worker.run(plan))
    assert request.kv.draft.committed == 6
    bench.steps()
    assert request.token_ids == expected_tokens(PROMPT, 8)
    assert bench.kv.baseline()


def test_what_is_swapped_out_may_come_back_in_the_same_plan():
    bench = bench_with()
    request = bench.add("a", PROMPT)
    bench.step()
    bench.scheduler.preempt(request)
    plan = bench.step()
    assert plan.swap_out
    assert request.status is Status.RUNNING
    bench.steps()
    assert request.token_ids == expected_tokens(PROMPT, 8)


@pytest.mark.parametrize("short", [0, 1])
def test_it_comes_back_only_when_its_full_need_is_there(short):
    bench = bench_with(prefix_cache=False)
    request = bench.add("a", PROMPT[:4], 8)
    bench.step()
    bench.scheduler.preempt(request)
    hog = hog_all_but(bench, 2 - short)  # one block of KV, and one for its next token
    plan = bench.step()
    assert (status_of(request) is Status.RUNNING) == (not short)
    assert bool(plan.swap_in) == (not short)
    bench.kv.release(hog)
    bench.steps()
    assert request.token_ids == expected_tokens(PROMPT[:4], 8)


@pytest.mark.parametrize("when", ["before the plan", "in flight", "in the host pool", "on the way back"])
@pytest.mark.parametrize("fails", [False, True])
def test_trap_d6_abort_of_a_swapped_request(when, fails):
    bench = bench_with(blocks=8, draft=8, draft_host=8)
    other = bench.add("other", [9, 9], 12)
    request = bench.add("a", PROMPT)
    bench.step()
    bench.scheduler.preempt(request)
    if when == "before the plan":
        bench.scheduler.finish("a")
    hog = hog_all_but(bench, 1)
    plan = bench.plan()
    if when == "in flight":
        assert status_of(request) is Status.SWAPPED
        bench.scheduler.finish("a")
        bench.scheduler.check()
    bench.commit(plan, bench.worker.run(plan))
    bench.kv.release(hog)
    if when == "in the host pool":
        bench.scheduler.finish("a")
    plan = bench.plan()
    if when == "on the way back":
        assert status_of(request) is Status.RUNNING
        assert plan.swap_in
        bench.scheduler.finish("a")
    bench.scheduler.check()
    if fails:
        bench.worker.abandoned = True
        bench.scheduler.abandon(plan)
    else:
        bench.commit(plan, bench.worker.run(plan))
    bench.scheduler.check()
    assert bench.kv.host.num_used == bench.kv.draft_host.num_used == 0
    bench.steps()
    assert other.token_ids == expected_tokens([9, 9], 12)
    assert bench.kv.baseline()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_trap_b10_a_draft_that_is_pending_when_the_kv_goes_is_never_verified(mode):
    bench = bench_with(mode=mode)
    request = bench.add("a", PROMPT, 10)
    while bench.scheduler.has_work:
        plan = bench.plan()
        assert all(not entry.draft for entry in plan.requests)
        bench.commit(plan, bench.worker.run(plan))
        if request.ready_to_draft:
            request.draft = draft_for(request, 1, 3)
            bench.scheduler.preempt(request)
    assert request.token_ids == expected_tokens(PROMPT, 10)
