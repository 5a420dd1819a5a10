"""Preemption: the latest first, recomputed, with the same tokens."""

from specserve.core.request import Status
from specserve.core.tree import EMPTY_TREE
from tests.fakes.sched import Bench, draft_for
from tests.fakes.worker import expected_tokens


def crowded(**options):
    """Two requests that fit at first and not to their ends."""
    bench = Bench(blocks=5, size=4, **options)
    return bench, bench.add("a", [1, 2, 3, 4, 5], 12), bench.add("b", [6, 7, 8], 12)


def until_preempted(bench, draft=0):
    while not bench.scheduler.num_preemptions:
        for request in bench.scheduler.running:
            if draft and request.ready_to_draft:
                request.draft = draft_for(request, 1, draft)
        plan = bench.step()
    return plan


def test_the_latest_gives_way_and_both_end_with_their_tokens():
    bench, a, b = crowded()
    plan = until_preempted(bench)
    assert b.status is Status.PREEMPTED
    assert (b.epoch, b.num_computed, b.kv) == (1, 0, None)
    assert plan.removed == ("b",)
    assert a.status is Status.RUNNING
    bench.steps()
    assert a.token_ids == expected_tokens([1, 2, 3, 4, 5], 12)
    assert b.token_ids == expected_tokens([6, 7, 8], 12)
    assert bench.kv.baseline()


def test_a_preempted_request_is_computed_again_like_a_prompt_outputs_included():
    bench, a, b = crowded(prefix_cache=False, max_batched_tokens=3)
    until_preempted(bench)
    known = b.num_tokens
    assert b.num_output_tokens > 0
    bench.scheduler.finish(a.request_id)
    plan = bench.step()
    assert plan.added[0].token_ids == tuple(b.token_ids[:known])
    assert plan.added[0].num_prompt_tokens == 3
    assert len(plan.requests[0].token_ids) == 3
    assert plan.requests[0].num_logits == 0
    assert plan.requests[0].epoch == 1
    bench.steps()
    assert b.token_ids == expected_tokens([6, 7, 8], 12)


def test_resuming_uses_what_is_still_cached_and_leaves_num_cached_alone():
    bench, a, b = crowded()
    until_preempted(bench)
    bench.scheduler.finish(a.request_id)
    plan = bench.plan()
    assert plan.requests[0].start > 0
    assert b.num_cached == 0
    bench.commit(plan, bench.worker.run(plan))
    bench.steps()
    assert b.token_ids == expected_tokens([6, 7, 8], 12)


def test_preempted_requests_resume_before_those_that_never_ran():
    bench, _, b = crowded()
    until_preempted(bench)
    bench.add("c", [1], 2)
    assert [r.request_id for r in bench.scheduler.waiting] == ["b", "c"]
    assert b.arrival < bench.scheduler.get("c").arrival
    bench.steps()


def test_nothing_is_admitted_in_a_step_that_preempts():
    bench, _, _ = crowded()
    bench.add("tiny", [1], 1, status=Status.COMPILING)
    tiny = bench.scheduler.get("tiny")
    while not bench.scheduler.num_preemptions:
        plan = bench.step()
        if bench.kv.target.num_free == 0 and tiny.status is Status.COMPILING:
            tiny.move_to(Status.WAITING)
    assert plan.added == ()
    bench.steps()


def test_trap_b10_pending_drafts_are_dropped_with_the_kv():
    bench, a, b = crowded()
    while not bench.scheduler.num_preemptions:
        for request in bench.scheduler.running:
            if request.ready_to_draft:
                request.draft = draft_for(request, 1, 3)
        bench.step()
    assert b.draft is EMPTY_TREE
    bench.steps()
    assert a.token_ids == expected_tokens([1, 2, 3, 4, 5], 12)
    assert b.token_ids == expected_tokens([6, 7, 8], 12)


def test_drafts_are_dropped_before_anybody_is_preempted():
    plain, _, _ = crowded()
    until_preempted(plain)
    drafted, a, b = crowded()
    while not drafted.scheduler.num_preemptions:
        for request in drafted.scheduler.running:
            if request.ready_to_draft:
                request.draft = draft_for(request, 0, 6)
        drafted.step()
    assert (a.num_tokens, b.num_tokens) == tuple(
        r.num_tokens for r in (plain.scheduler.get("a"), plain.scheduler.get("b"))
    ), "wrong drafts brought the preemption no nearer"


def test_the_last_priority_gives_way_first():
    bench = Bench(blocks=5, size=4)
    low = bench.add("low", [1, 2, 3, 4, 5], 12, priority=1)
    high = bench.add("high", [6, 7, 8], 12)
    until_preempted(bench)
    assert low.status is Status.PREEMPTED
    assert high.status is Status.RUNNING
    bench.steps()
    assert low.token_ids == expected_tokens([1, 2, 3, 4, 5], 12)


def test_the_latest_request_sits_out_rather_than_giving_up_for_nothing():
    bench = Bench(blocks=4, size=4)
    a = bench.add("a", [1, 2, 3, 4, 5], 9)
    b = bench.add("b", [1, 1, 1, 1], 3)
    bench.step()
    hog = bench.kv.open([3], "")
    bench.kv.reserve(hog, 4 * bench.kv.target.num_free) if bench.kv.target.num_free else None
    while a.num_tokens <= 7:
        bench.step()
    assert bench.scheduler.num_preemptions == 0
    bench.kv.release(hog)
    bench.steps()
    assert b.token_ids == expected_tokens([1, 1, 1, 1], 3)
