"""Beams that are swapped, plans of moves alone, and plans with moves that fail."""

import pytest

from specserve.core.request import Status
from specserve.sched.family import beam_blocks
from tests.fakes.sched import Bench, status_of
from tests.fakes.worker import expected_tokens

PROMPT = [1, 2, 3, 4, 5]


def bench_with(*, host=8, mode="swap", **options):
    return Bench(size=4, host=host, mode=mode, **options)


def hog_all_but(bench, free):
    seq = bench.kv.open([1], "")
    bench.kv.reserve(seq, (bench.kv.target.num_free - free) * bench.kv.block_size)
    return seq


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
