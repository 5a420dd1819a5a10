"""Preemption: the latest first, recomputed, with the same tokens."""

from specserve.core.request import Status
from specserve.core.tree import EMPTY_TREE
from specserve.sched.preempt import together, victim
from tests.fakes.sched import Bench, draft_for
from tests.fakes.worker import expected_tokens


def crowded(**options):
    """Two requests that fit at first and not to their ends."""
    bench = Bench(blocks=5, size=4, **options)
    return bench, bench.add("a", [1, 2, 3, 4, 5], 12), bench.add("b", [6, 7, 8], 12)


def until_preempted(bench, good=0, bad=0):
    for _ in range(40):
        for request in bench.scheduler.running:
            if request.ready_to_draft:
                request.draft = draft_for(request, good, bad)
        plan = bench.step()
        if bench.scheduler.num_preemptions:
            return plan
    raise AssertionError("nobody was preempted")


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
    for _ in range(40):
        plan = bench.step()
        if bench.scheduler.num_preemptions:
            break
        if bench.kv.target.num_free == 0 and tiny.status is Status.COMPILING:
            tiny.move_to(Status.WAITING)
    assert plan.added == ()
    bench.steps()


def test_trap_b10_pending_drafts_are_dropped_with_the_kv():
    bench, a, b = crowded()
    until_preempted(bench, 1, 3)
    assert b.draft is EMPTY_TREE
    bench.steps()
    assert a.token_ids == expected_tokens([1, 2, 3, 4, 5], 12)
    assert b.token_ids == expected_tokens([6, 7, 8], 12)


def test_drafts_are_dropped_before_anybody_is_preempted():
    plain, _, _ = crowded()
    until_preempted(plain)
    drafted, a, b = crowded()
    until_preempted(drafted, 0, 6)
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


def test_rows_of_the_preempted_go_to_those_that_stay():
    bench = Bench(blocks=5, size=4, max_batched_tokens=4)
    bench.add("a", [1, 2, 3, 4, 5], 15)
    bench.add("b", [6, 7, 8], 17)
    plan = until_preempted(bench, 0, 7)
    assert [len(r.token_ids) for r in plan.requests] == [4]


def test_without_a_later_request_one_sits_the_step_out_and_drops_its_draft():
    bench = Bench(blocks=2, size=4, draft=4)
    request = bench.add("a", [1, 2, 3], 5)
    bench.step()
    bench.step()
    hog = bench.kv.open([3], "")
    bench.kv.reserve(hog, 4)
    bench.kv.reserve_draft(request.kv, 9)
    bench.kv.commit_draft(request.kv, request.token_ids, 5)
    bench.kv.write_draft(request.kv, 2)
    request.draft = draft_for(request, 2)
    assert bench.plan() is None
    assert (request.status, request.draft, request.kv.written) == (Status.RUNNING, EMPTY_TREE, 0)
    assert len(request.kv.draft.block_ids) == 2
    assert bench.scheduler.exhausted == []
    assert bench.scheduler.stalled_steps == 1
    bench.kv.release(hog)
    bench.steps()
    assert request.token_ids == expected_tokens([1, 2, 3], 5)


def test_a_preempted_request_that_has_outgrown_the_pool_is_reported_and_holds_nobody_up():
    bench = Bench(blocks=2, size=4, skip_window=0)
    request = bench.add("a", [1, 2, 3], None)
    while request.num_tokens < 8:
        bench.step()
    bench.scheduler.preempt(request)
    other = bench.add("b", [1, 2], 2)
    bench.step()
    assert bench.scheduler.exhausted == [request]
    assert other.num_output_tokens == 1
    bench.scheduler.finish("a")
    bench.steps()
    assert bench.kv.baseline()


# Families


def test_a_choice_gives_way_alone_and_the_others_keep_the_prompt():
    bench = Bench(size=4, prefix_cache=False)
    members = bench.add_choices("a", 3, [1, 2, 3, 4, 5], 6)
    for _ in range(3):
        bench.step()
    assert together(members[2]) == [members[2]]
    bench.scheduler.preempt(members[2])
    assert [member.status for member in members] == [Status.RUNNING, Status.RUNNING, Status.PREEMPTED]
    plan = bench.step()
    assert {e.request_id: e.start for e in plan.requests}["a.2"] == 5, "it forks the prompt again"
    bench.steps()
    for i, member in enumerate(members):
        assert member.token_ids == expected_tokens([1, 2, 3, 4, 5], 6, salt=i + 1)


def test_later_beams_give_way_to_an_earlier_request_all_together():
    bench = Bench(blocks=7, size=4, prefix_cache=False)
    first = bench.add("a", [1, 2, 3, 4, 5], 20)
    search = bench.add_search("s", 2, [1, 2, 3], 9)
    while not bench.scheduler.num_preemptions:
        assert search.results is None
        bench.step()
    assert bench.scheduler.num_preemptions == 2
    assert {beam.status for beam in search.beams.values()} == {Status.PREEMPTED}
    bench.steps()
    assert search.results == search.expected
    assert first.token_ids == expected_tokens([1, 2, 3, 4, 5], 20)


def test_a_later_request_gives_way_to_beams_and_no_beam_to_another():
    bench = Bench(blocks=10, size=4, prefix_cache=False)
    search = bench.add_search("s", 3, [1, 2, 3], 9)
    last = bench.add("b", list(range(13)), 16)
    beams = []
    while not bench.scheduler.num_preemptions:
        assert search.results is None
        bench.step()
        beams = list(search.beams.values())
    assert last.status is Status.PREEMPTED
    assert all(victim(bench.scheduler.running, beam) is None for beam in beams)
    assert together(beams[0]) == beams
    bench.steps()
    assert search.results == search.expected
    assert last.token_ids == expected_tokens(list(range(13)), 16)


def test_trap_b10_drafts_of_beams_are_dropped_with_their_kv():
    for salt in range(5):
        bench = Bench(blocks=7, size=4)
        first = bench.add("a", [1, 2, 3, 4, 5], 20)
        search = bench.add_search("s", 2, [1, 2, 3], 9, salt=salt)
        while bench.scheduler.has_work:
            for request in bench.scheduler.running:
                if request.ready_to_draft:
                    request.draft = draft_for(request, 2, 1, salt=bench.salts[request.request_id])
            before = bench.scheduler.num_preemptions
            bench.step()
            if bench.scheduler.num_preemptions > before:
                assert all(beam.draft is EMPTY_TREE for beam in search.beams.values())
        assert search.results == search.expected
        assert first.token_ids == expected_tokens([1, 2, 3, 4, 5], 20)
