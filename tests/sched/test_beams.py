"""Beam searches: beams that wait for each other, share a place and give way together."""

import pytest

from specserve.core.errors import CapacityError
from specserve.core.request import Status
from specserve.sched.family import beam_blocks
from tests.fakes.sched import Bench, draft_for, status_of
from tests.fakes.search import expected_beams
from tests.fakes.worker import expected_tokens

PROMPT = list(range(10))


def entries(plan):
    return {entry.request_id: (entry.start, len(entry.token_ids)) for entry in plan.requests}


def run(bench, drafts=0):
    while bench.scheduler.has_work:
        for request in bench.scheduler.running:
            if drafts and request.ready_to_draft:
                request.draft = draft_for(request, drafts, salt=bench.salts[request.request_id])
        bench.step()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("cache", [True, False])
def test_beams_end_with_the_texts_of_a_search_alone(cache, drafts):
    for salt in range(6):
        bench = Bench(size=4, prefix_cache=cache)
        search = bench.add_search("s", 4, PROMPT, 9, salt=salt)
        other = bench.add("b", [1, 2, 3], 9)
        run(bench, drafts)
        assert search.results == expected_beams(PROMPT, 4, 9, salt)
        assert other.token_ids == expected_tokens([1, 2, 3], 9)
        assert bench.kv.baseline()


def test_beams_hold_full_blocks_of_what_they_share_once():
    bench = Bench(size=4, prefix_cache=False)
    search = bench.add_search("s", 3, list(range(12)), 3)
    bench.step()
    assert len(search.beams) == 3
    bench.plan()
    tables = [beam.kv.target.block_ids for beam in search.beams.values()]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({table[3] for table in tables}) == 3
    assert bench.kv.target.num_used == 3 + 3
    assert beam_blocks(12, 3, 3, 4) == 3 + 3 + 1


def test_a_parked_beam_is_not_planned_until_the_others_are_there():
    bench = Bench(size=4, mode="recompute", max_batched_tokens=16)
    search = bench.add_search("s", 2, PROMPT, 6)
    bench.step()
    bench.step()
    first, second = search.beams.values()
    bench.scheduler.preempt(first)
    assert {first.status, second.status} == {Status.PREEMPTED}, "they give way together"
    plan = bench.plan()
    assert set(entries(plan)) == {first.request_id}, "the other goes on from what the first computes"
    bench.commit(plan, bench.worker.run(plan))
    assert first.parked
    plan = bench.step()
    assert set(entries(plan)) == {second.request_id}
    assert not first.parked
    bench.steps()
    assert search.results == search.expected


def test_beams_leave_their_places_to_the_others():
    for salt in range(8):
        bench = Bench(size=2, blocks=60, max_running=4)
        search = bench.add_search("s", 4, PROMPT, 10, salt=salt)
        other = bench.add("b", [1], 2)
        while search.results is None:
            bench.step()
            assert status_of(other) is Status.WAITING, "all places are the search's from the start"
            assert len(bench.scheduler.running) in (0, len(search.beams))
        bench.steps()
        assert search.results == search.expected


def test_a_search_waits_for_places_for_all_its_beams_and_may_be_passed():
    bench = Bench(max_running=3)
    running = bench.add("a", [1], 4)
    search = bench.add_search("s", 3, PROMPT, 2)
    small = bench.add("b", [2], 2)
    assert set(entries(bench.step())) == {"a", "b"}
    bench.steps()
    assert search.results == search.expected
    assert running.num_output_tokens == 4
    assert small.num_output_tokens == 2


def test_a_beam_that_ends_while_it_waits_leaves_its_places():
    bench = Bench(max_running=4, mode="recompute")
    search = bench.add_search("s", 4, PROMPT, 6)
    bench.step()
    bench.scheduler.preempt(next(iter(search.beams.values())))
    gone = next(iter(search.beams.values()))
    bench.scheduler.finish(gone.request_id)
    search.forget(gone)
    assert sum(beam.places for beam in search.beams.values()) == 4
    bench.steps()
    assert len(search.results) == 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_trap_d1_a_search_that_fits_alone_ends_in_the_smallest_pool_that_takes_it(mode):
    for prompt, max_tokens, width, size in [(5, 7, 3, 4), (4, 4, 2, 2), (1, 9, 5, 4), (8, 3, 4, 4), (3, 6, 5, 1)]:
        blocks = beam_blocks(prompt, max_tokens, width, size)
        bench = Bench(blocks=blocks, size=size, mode=mode, host=blocks)
        search = bench.add_search("s", width, PROMPT[:prompt], max_tokens)
        for i in range(3 * max_tokens):
            if i % 3 == 2 and bench.scheduler.running:
                bench.scheduler.preempt(bench.scheduler.running[0])
            bench.step()
        bench.steps()
        assert search.results == search.expected
        assert bench.scheduler.stalled_steps == 0
        smaller = Bench(blocks=blocks - 1, size=size)
        with pytest.raises(CapacityError, match=f"need up to {blocks} KV blocks; the pool has {blocks - 1}"):
            smaller.add_search("s", width, PROMPT[:prompt], max_tokens)


@pytest.mark.parametrize(("running", "rows"), [(3, 64), (64, 3)])
def test_trap_d1_more_beams_than_may_run_are_refused_with_the_numbers(running, rows):
    bench = Bench(max_running=running, max_batched_tokens=rows)
    with pytest.raises(CapacityError, match="4 beams run at once, the engine runs at most 3") as caught:
        bench.add_search("s", 4, [1], 2)
    assert caught.value.param == "beam_width"
    assert bench.scheduler.waiting == ()


def test_two_searches_that_wait_for_each_others_blocks_do_not_stall():
    bench = Bench(blocks=14, size=2, prefix_cache=False, mode="recompute")
    first = bench.add_search("a", 2, [1, 2, 3], 6)
    second = bench.add_search("b", 2, [4, 5, 6], 6)
    for _ in range(3):
        bench.step()
    for search in (first, second):
        bench.scheduler.preempt(next(iter(search.beams.values())))
    bench.step()
    assert [len([b for b in s.beams.values() if b.status is Status.RUNNING]) for s in (first, second)] == [1, 1]
    hog = bench.kv.open([1], "")
    bench.kv.reserve(hog, bench.kv.target.num_free * 2)
    while bench.scheduler.num_preemptions == 4:
        plan = bench.step()
        assert plan is not None
    assert [r.status for r in second.beams.values()] == [Status.PREEMPTED] * 2, "the latest give way to the first"
    assert set(entries(plan)) <= set(first.beams)
    assert entries(plan)
    bench.kv.release(hog)
    bench.steps()
    assert first.results == first.expected
    assert second.results == second.expected
    assert bench.scheduler.stalled_steps == 0


def partly_waiting(width, **options):
    """A search whose first beam is parked, the others of which wait."""
    bench = Bench(size=4, prefix_cache=False, mode="recompute", max_batched_tokens=16, **options)
    search = bench.add_search("s", width, list(range(14)), 6)
    bench.step()
    bench.step()
    first, *others = search.beams.values()
    bench.scheduler.preempt(first)
    bench.step()
    assert first.parked
    assert {beam.status for beam in others} == {Status.PREEMPTED}
    return bench, search, first, others


def test_places_of_a_beam_that_ends_go_to_one_that_does_what_it_did():
    bench, search, first, (second, third) = partly_waiting(3, max_running=3)
    bench.scheduler.finish(third.request_id)
    search.forget(third)
    bench.scheduler.check()
    assert (first.places, second.places) == (1, 2)
    bench.steps()
    assert len(search.results) == 3


def test_a_parked_beam_leaves_its_row_to_others():
    bench, search, first, _ = partly_waiting(2)
    bench.add("b", list(range(40)), 2)
    plan = bench.plan()
    assert first.request_id not in entries(plan)
    assert plan.num_rows == 16
    bench.commit(plan, bench.worker.run(plan))
    bench.steps()
    assert search.results == search.expected


def test_trap_d3_small_requests_pass_a_search_only_so_often():
    bench = Bench(blocks=10, size=4, prefix_cache=False, skip_patience=3)
    running = bench.add("a", list(range(12)), 12)
    bench.step()
    search = bench.add_search("s", 3, [1, 2, 3, 4, 5, 6], 6)  # needs more than is left
    passed = []
    for i in range(12):
        bench.add(f"b{i}", [i], 2)
        plan = bench.step()
        passed += [new.request_id for new in plan.added]
        if any(name.startswith("s.") for name in passed):
            break
    before = [name for name in passed if name.startswith("b")]
    assert 1 <= len(before) <= 3
    bench.steps()
    assert search.results == search.expected
    assert running.num_output_tokens == 12
