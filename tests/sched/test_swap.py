"""Preemption to the host pool and back, with the same tokens; plans with moves that fail."""

import pytest

from specserve.core.request import Status
from specserve.sched.family import beam_blocks
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


# Beams


def parted(**options):
    """A search of three beams that are all running, each with a block of its own."""
    bench = bench_with(prefix_cache=False, host=20, **options)
    search = bench.add_search("s", 3, PROMPT, 9)
    for _ in range(3):
        bench.step()
    return bench, search, list(search.beams.values())


@pytest.mark.parametrize("short", [0, 1])
def test_the_beams_of_a_search_go_and_come_back_together(short):
    bench, search, beams = parted()
    bench.scheduler.preempt(beams[1])
    assert {beam.status for beam in beams} == {Status.SWAPPED}
    plan = bench.plan()
    assert {beam.status for beam in beams} == {Status.RUNNING}
    used = bench.kv.target.num_used
    bench.commit(plan, bench.worker.run(plan))
    beams = list(search.beams.values())
    bench.scheduler.preempt(beams[0])
    hog = hog_all_but(bench, used - short)
    bench.step()
    if short:
        assert {status_of(beam) for beam in beams} == {Status.SWAPPED}
    bench.kv.release(hog)
    bench.steps()
    assert search.results == search.expected
    assert bench.kv.baseline()


def test_beams_come_back_for_good_though_nobody_may_pass_another_any_more():
    bench, search, beams = parted(blocks=16, skip_patience=1)
    bench.scheduler.preempt(beams[0])
    bench.step()
    bench.scheduler.preempt(next(iter(search.beams.values())))
    large = bench.add("large", [9], 50, priority=-1)
    large.append(tuple([9] * 45))
    bench.scheduler.check()
    hog = hog_all_but(bench, 9)
    plan = bench.plan()
    assert "large" not in {entry.request_id for entry in plan.requests}
    assert all(beam.status is Status.RUNNING for beam in search.beams.values())
    bench.scheduler.check()
    bench.commit(plan, bench.worker.run(plan))
    bench.kv.release(hog)
    bench.scheduler.finish("large")
    bench.steps()
    assert search.results == search.expected


def test_beams_that_share_the_block_they_write_come_back_to_the_pool_that_they_fill():
    bench = bench_with(blocks=beam_blocks(8, 4, 3, 4), host=20, prefix_cache=False)
    search = bench.add_search("s", 3, [1, 2, 3, 4, 5, 6, 7, 8], 4)
    while search.results is None:
        bench.step()
        if bench.scheduler.running:
            bench.scheduler.preempt(bench.scheduler.running[0])
        assert bench.scheduler.stalled_steps == 0
    assert search.results == search.expected


def half_parked(**options):
    """A swapped search of two beams, the first of which has computed its last token."""
    bench = bench_with(prefix_cache=False, host=20, max_batched_tokens=16, **options)
    search = bench.add_search("s", 2, list(range(14)), 6)
    bench.step()
    bench.step()
    first, second = search.beams.values()
    bench.preemption.mode = "recompute"
    bench.scheduler.preempt(first)
    bench.step()
    assert first.parked
    assert second.status is Status.PREEMPTED
    bench.preemption.mode = "swap"
    bench.scheduler.preempt(first)
    assert first.status is Status.SWAPPED
    hog = hog_all_but(bench, 0)
    assert bench.step().swap_out
    bench.kv.release(hog)
    return bench, search, first, second


def test_a_plan_with_moves_alone_is_a_plan():
    bench, search, first, second = half_parked()
    hog = hog_all_but(bench, bench.kv.target.blocks_for(first.num_tokens + 1))
    plan = bench.plan()
    assert plan.requests == ()
    assert plan.swap_out == ()
    assert plan.swap_in
    assert [new.request_id for new in plan.added] == [first.request_id]
    bench.commit(plan, bench.worker.run(plan))
    assert first.parked
    assert second.status is Status.PREEMPTED
    bench.kv.release(hog)
    bench.steps()
    assert search.results == search.expected
    assert bench.kv.baseline()


def test_a_parked_beam_that_comes_back_in_vain_gives_way_in_the_same_step():
    bench, search, first, second = half_parked()
    free = bench.kv.target.blocks_for(first.num_tokens + 1)
    large = bench.add("large", list(range(4 * free)), 2, priority=-1)
    hog = hog_all_but(bench, free)
    plan = bench.plan()
    assert plan.requests == plan.added == ()
    assert plan.swap_in, "what was decided first is run, and nobody has it"
    assert [beam.status for beam in (first, second, large)] == [Status.PREEMPTED, Status.PREEMPTED, Status.WAITING]
    bench.commit(plan, bench.worker.run(plan))
    bench.kv.release(hog)
    bench.steps()
    assert search.results == search.expected
    assert large.num_output_tokens == 2
    assert bench.kv.baseline()


@pytest.mark.parametrize("moved", [False, True])
def test_a_parked_beam_that_came_back_with_a_failed_plan_is_computed_again(moved):
    bench, search, first, _ = half_parked()
    plan = bench.plan()
    assert first.status is Status.RUNNING
    assert first.request_id not in {entry.request_id for entry in plan.requests}
    if moved:
        bench.worker.move(plan)
    bench.worker.abandoned = True
    bench.scheduler.abandon(plan)
    bench.scheduler.check()
    assert status_of(first) is Status.PREEMPTED
    bench.steps()
    assert search.results == search.expected


def test_a_beam_without_a_row_is_told_again_after_a_failed_plan():
    bench = bench_with(prefix_cache=False)
    search = bench.add_search("s", 2, PROMPT, 4)
    bench.step()
    hog = hog_all_but(bench, 1)
    plan = bench.plan()
    assert [entry.request_id for entry in plan.requests] == ["s.0"], "one block is free, for one of two copies"
    assert [new.request_id for new in plan.added] == ["s.1"]
    bench.worker.abandoned = True
    bench.scheduler.abandon(plan)
    bench.scheduler.check()
    bench.kv.release(hog)
    assert [new.request_id for new in bench.step().added] == ["s.1"]
    bench.steps()
    assert search.results == search.expected


# Plans that fail


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_what_a_failed_plan_moved_is_computed_again_and_what_was_forked_from_it(moved, cache):
    bench = bench_with(prefix_cache=cache)
    members = bench.add_choices("a", 2, list(range(10)), 4)
    bystander = bench.add("b", [7, 7], 9)
    bench.step()
    bench.scheduler.preempt(members[0])
    other = bench.kv.open([1], "")
    bench.kv.reserve(other, bench.kv.target.num_free * 4)
    bench.step()
    bench.kv.release(other)  # what was cached is overwritten
    plan = bench.plan()
    assert plan.swap_in
    assert {entry.request_id for entry in plan.requests} == {"a.0", "a.1", "b"}
    if moved:
        bench.worker.move(plan)
    bench.worker.abandoned = True
    bench.scheduler.abandon(plan)
    bench.scheduler.check()
    assert [member.status for member in members] == [Status.PREEMPTED] * 2
    assert bystander.status is Status.RUNNING
    assert bench.kv.host.num_used == 0
    bench.steps()
    for i, member in enumerate(members):
        assert member.token_ids == expected_tokens(list(range(10)), 4, salt=i + 1)
    assert bystander.token_ids == expected_tokens([7, 7], 9)


def test_what_a_failed_plan_was_to_swap_out_is_computed_again():
    bench = bench_with(blocks=8)
    request = bench.add("a", PROMPT)
    bench.step()
    bench.scheduler.preempt(request)
    hog = hog_all_but(bench, 0)
    plan = bench.plan()
    assert plan.requests == ()
    bench.worker.abandoned = True
    bench.scheduler.abandon(plan)
    bench.scheduler.check()
    assert (request.status, request.epoch, request.num_computed) == (Status.PREEMPTED, 2, 0)
    assert bench.kv.host.num_used == 0
    bench.kv.release(hog)
    bench.steps()
    assert request.token_ids == expected_tokens(PROMPT, 8)


def test_what_ends_while_a_failed_plan_brings_it_in_is_never_found():
    bench = bench_with(blocks=8)
    request = bench.add("a", [*PROMPT, 6, 7, 8, 9])
    bench.step()
    bench.scheduler.preempt(request)
    hog = hog_all_but(bench, 0)
    bench.step()
    bench.kv.release(hog)
    plan = bench.plan()
    assert plan.swap_in
    bench.scheduler.finish("a")
    bench.worker.abandoned = True
    bench.scheduler.abandon(plan)
    bench.scheduler.check()
    assert bench.kv.target.num_published == 0
    assert bench.kv.baseline()
    again = bench.add("b", [*PROMPT, 6, 7, 8, 9])
    bench.steps()
    assert again.token_ids == expected_tokens([*PROMPT, 6, 7, 8, 9], 8)


# Ends


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
