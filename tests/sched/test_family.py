"""Families: members share the KV of one prompt; forks."""

import pytest

from specserve.core.errors import CapacityError, OverloadedError
from specserve.core.request import Family, Status
from specserve.sched.family import origin, private_blocks
from specserve.sched.policy import Verdict
from tests.fakes.sched import Bench
from tests.fakes.worker import expected_tokens

PROMPT = list(range(10))


def entries(plan):
    return {entry.request_id: (entry.start, len(entry.token_ids)) for entry in plan.requests}


def with_own_tokens(members, prompt, max_tokens):
    for i, member in enumerate(members):
        assert member.token_ids == expected_tokens(prompt, max_tokens, salt=i + 1)


@pytest.mark.parametrize("cache", [True, False])
def test_choices_wait_for_the_first_and_share_its_prompt_with_and_without_prefix_cache(cache):
    bench = Bench(size=4, prefix_cache=cache, max_batched_tokens=6)
    members = bench.add_choices("a", 3, PROMPT, 3)
    assert entries(bench.step()) == {"a.0": (0, 6)}
    assert entries(bench.step()) == {"a.0": (6, 4)}
    plan = bench.step()
    assert entries(plan) == {"a.0": (10, 1), "a.1": (9, 1), "a.2": (9, 1)}
    assert len(plan.copies) == 2, "the block that position 9 is in is copied for each fork"
    shared = [member.kv.target.block_ids[:2] for member in members]
    assert shared[0] == shared[1] == shared[2]
    assert bench.kv.target.num_used == 2 + 3
    assert [member.num_cached for member in members] == [0, 9, 9]
    bench.steps()
    with_own_tokens(members, PROMPT, 3)
    assert bench.kv.baseline()


@pytest.mark.parametrize(("prompt", "copies"), [([1, 2, 3, 4, 5], 1), ([1, 2, 3, 4, 5, 6], 0)])
@pytest.mark.parametrize("free", [0, 1])
def test_a_fork_needs_one_free_block_in_the_middle_of_a_block_and_at_its_edge(prompt, copies, free):
    """All but the last token are forked."""
    size = 3 if copies else 5
    bench = Bench(blocks=8, size=size, prefix_cache=False)
    members = bench.add_choices("a", 2, prompt, 2)
    bench.step()
    hog = bench.kv.open([1], "")
    bench.kv.reserve(hog, (bench.kv.target.num_free - free) * size)
    plan = bench.step()
    assert ("a.1" in entries(plan)) == (free == 1)
    assert len(plan.copies) == copies * free
    bench.kv.release(hog)
    bench.steps()
    with_own_tokens(members, prompt, 2)
    assert bench.scheduler.num_preemptions == 0
    assert bench.kv.baseline()


def test_a_waiting_member_whose_source_was_preempted_waits_for_it_again():
    bench = Bench(size=4, prefix_cache=False, max_batched_tokens=16, mode="recompute")
    members = bench.add_choices("a", 2, PROMPT, 3)
    bench.step()
    bench.scheduler.preempt(members[0])
    assert entries(bench.step()) == {"a.0": (0, 11)}, "its output so far is computed again with the prompt"
    assert entries(bench.step()) == {"a.0": (11, 1), "a.1": (9, 1)}
    bench.steps()
    with_own_tokens(members, PROMPT, 3)


def test_a_waiting_member_whose_source_is_swapped_forks_what_comes_back_in_the_same_plan():
    bench = Bench(size=4, prefix_cache=False, mode="swap", host=8)
    members = bench.add_choices("a", 2, PROMPT, 3)
    bench.step()
    bench.scheduler.preempt(members[0])
    assert members[0].status is Status.SWAPPED
    hog = bench.kv.open([1], "")
    bench.kv.reserve(hog, 4 * 30)
    plan = bench.plan()
    assert entries(plan) == {}, "nothing comes back without room, and the other waits for it"
    bench.commit(plan, bench.worker.run(plan))
    bench.kv.release(hog)
    plan = bench.step()
    assert plan.swap_in
    assert entries(plan) == {"a.0": (10, 1), "a.1": (9, 1)}
    bench.steps()
    with_own_tokens(members, PROMPT, 3)


@pytest.mark.parametrize("cache", [True, False])
def test_a_waiting_member_whose_source_has_ended_begins_by_itself(cache):
    bench = Bench(size=4, prefix_cache=cache)
    members = bench.add_choices("a", 3, PROMPT, 3)
    bench.step()
    bench.scheduler.finish("a.0")
    assert entries(bench.step()) == {"a.1": (8, 2) if cache else (0, 10)}
    bench.steps()
    assert members[1].token_ids == expected_tokens(PROMPT, 3, salt=2)
    assert members[2].token_ids == expected_tokens(PROMPT, 3, salt=3)


@pytest.mark.parametrize("blocks", [7, 8])
def test_nobody_takes_the_blocks_of_members_that_wait_for_the_prompt(blocks):
    bench = Bench(blocks=blocks, size=4, prefix_cache=False, skip_patience=1)
    members = bench.add_choices("a", 2, list(range(12)), 2)
    other = bench.add("b", [9, 9, 9, 9], 2)
    # The first needs 4 blocks; the second 2, as the last token of the prompt is its own; the other 2.
    assert ("b" in entries(bench.step())) == (blocks == 8)
    assert "a.1" in entries(bench.step())
    bench.steps()
    with_own_tokens(members, list(range(12)), 2)
    assert other.token_ids == expected_tokens([9, 9, 9, 9], 2)


def test_priority_comes_before_the_members_that_wait():
    bench = Bench(max_running=2)
    members = bench.add_choices("a", 3, PROMPT, 4, priority=1)
    bench.step()
    bench.add("urgent", [1], 2)
    assert set(entries(bench.step())) == {"a.0", "urgent"}
    bench.steps()
    with_own_tokens(members, PROMPT, 4)


def test_fewer_places_than_choices():
    bench = Bench(max_running=2)
    members = bench.add_choices("a", 5, PROMPT, 3)
    most = 0
    while bench.scheduler.has_work:
        bench.step()
        most = max(most, len(bench.scheduler.running))
    assert most == 2
    with_own_tokens(members, PROMPT, 3)
    assert bench.kv.baseline()


def test_origin_says_whose_kv_a_member_begins_on():
    bench = Bench(size=4, prefix_cache=False, max_batched_tokens=6)
    a, b, c = bench.add_choices("a", 3, PROMPT, 3)
    assert origin(a) is None
    assert origin(b) is Verdict.HELD
    bench.step()
    assert origin(b) is Verdict.HELD, "six of nine tokens are computed"
    bench.step()
    assert origin(b) == (a, 9)
    assert origin(c) is Verdict.HELD, "an earlier one waits as well"
    assert origin(bench.request("alone", [1])) is None


def test_all_of_a_family_are_queued_or_none():
    bench = Bench(blocks=4, size=4, max_waiting=3)
    family = Family()
    fit = bench.request("fits", [1], 4, family=family, index=0)
    large = bench.request("large", [1], 40, family=family, index=1)
    with pytest.raises(CapacityError):
        bench.scheduler.add_all([fit, large])
    assert bench.scheduler.waiting == ()
    assert family.members == []
    bench.add("x", [1])
    with pytest.raises(OverloadedError, match="the limit is 3"):
        bench.add_choices("many", 3, [1], 2)
    assert [r.request_id for r in bench.scheduler.waiting] == ["x"]
    bench.scheduler.check()
    bench.steps()


def test_private_blocks_are_those_beside_full_ones_of_the_prompt():
    bench = Bench()
    request = bench.request("a", PROMPT)
    assert private_blocks(request, 4) == 3 - 2
    assert private_blocks(bench.request("b", list(range(8))), 4) == 3 - 1, "the last token is computed by each"
    request.append((1, 2, 3))
    assert private_blocks(request, 4) == 4 - 2


def test_a_fork_without_a_place_waits_in_the_queue():
    bench = Bench(max_running=2)
    parent = bench.add("a", [1, 2, 3], 6)
    other = bench.add("b", [4], 3)
    bench.step()
    child = bench.request("c", [1, 2, 3], 6, family=Family(), index=1)
    child.append(tuple(parent.output_token_ids))
    bench.scheduler.fork(parent, child)
    bench.scheduler.check()
    assert child.status is Status.WAITING
    bench.steps()
    assert child.token_ids == parent.token_ids
    assert other.num_output_tokens == 3


def test_a_fork_goes_on_from_all_that_is_computed():
    bench = Bench(size=4, prefix_cache=False)
    parent = bench.add("a", [1, 2, 3, 4, 5], 6)
    bench.step()
    bench.step()
    child = bench.request("c", [1, 2, 3, 4, 5], 6)
    child.append(tuple(parent.output_token_ids))
    bench.scheduler.fork(parent, child)
    bench.scheduler.check()
    plan = bench.step()
    assert entries(plan) == {"a": (6, 1), "c": (6, 1)}
    assert len({copy.src for copy in plan.copies}) == 1
    assert parent.kv.target.block_ids[0] == child.kv.target.block_ids[0]
    assert parent.kv.target.block_ids[1] != child.kv.target.block_ids[1]
    assert [new.request_id for new in plan.added] == ["c"]
    bench.steps()
    assert child.token_ids == parent.token_ids == expected_tokens([1, 2, 3, 4, 5], 6)


def test_nothing_is_forked_or_preempted_while_a_plan_is_in_flight():
    bench = Bench()
    request = bench.add("a", [1], 2)
    bench.plan()
    with pytest.raises(RuntimeError, match="in flight"):
        bench.scheduler.fork(request, bench.request("b", [1]))
    with pytest.raises(RuntimeError, match="in flight"):
        bench.scheduler.preempt(request)
