"""Scheduler: chunks, drafts, budgets, admission, refusals."""

import pytest

from specserve.core.errors import CapacityError, InvalidRequestError, OverloadedError
from specserve.core.plan import SampledTokens, StepResult
from specserve.core.request import Status
from specserve.sched.scheduler import SchedulerLimits
from tests.fakes.sched import Bench, draft_for
from tests.fakes.worker import expected_tokens


def rows(plan):
    return {r.request_id: len(r.token_ids) for r in plan.requests}


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_prompts_are_computed_in_chunks_and_give_the_same_tokens(budget):
    bench = Bench(max_batched_tokens=budget)
    prompt = list(range(20))
    request = bench.add("a", prompt, 6)
    plan = bench.step()
    assert rows(plan) == {"a": min(budget, 20)}
    assert plan.requests[0].num_logits == (1 if budget >= 20 else 0)
    bench.steps()
    assert request.token_ids == expected_tokens(prompt, 6)
    assert bench.kv.baseline()
    assert bench.worker.max_rows <= budget


def test_decodes_come_first_then_chunks_under_the_budget():
    bench = Bench(max_batched_tokens=10)
    bench.add("a", [1, 2, 3])
    bench.step()
    bench.add("b", list(range(30)))
    bench.add("c", [4, 5])
    plan = bench.step()
    assert rows(plan) == {"a": 1, "b": 9}
    assert [new.request_id for new in plan.added] == ["b"]
    a = bench.scheduler.get("a")
    a.draft = draft_for(a, 3)
    plan = bench.step()
    assert rows(plan) == {"a": 4, "b": 6}
    assert [r.num_logits for r in plan.requests] == [4, 0]


def test_prefix_hits_are_counted_and_skipped():
    bench = Bench()
    prompt = list(range(10))
    bench.add("a", prompt, 2)
    bench.steps()
    request = bench.add("b", [*prompt, 7], 2)
    plan = bench.plan()
    assert plan.requests[0].start == 8
    assert request.num_cached == 8
    bench.commit(plan, bench.worker.run(plan))
    bench.steps()
    assert request.token_ids == expected_tokens([*prompt, 7], 2)


def test_trap_d15_a_namespace_sees_its_own_prefixes_only():
    bench = Bench()
    prompt = list(range(10))
    bench.add("a", prompt, 1, namespace="one")
    bench.steps()
    other, same = bench.add("b", prompt, 1, namespace="two"), bench.add("c", prompt, 1, namespace="one")
    bench.steps()
    assert (other.num_cached, same.num_cached) == (0, 8)


def test_trap_d12_the_same_request_cold_and_warm():
    bench = Bench()
    cold = bench.add("a", list(range(11)), 9)
    bench.steps()
    warm = bench.add("b", list(range(11)), 9)
    bench.steps()
    assert warm.num_cached == 8
    assert warm.token_ids == cold.token_ids


def test_trap_d1_a_request_that_never_fits_is_refused_with_the_numbers():
    bench = Bench(blocks=4, size=4)
    bench.add("fits", list(range(10)), 6)
    with pytest.raises(
        CapacityError, match=r"max_tokens: a prompt of 10 tokens and 7 of the answer need 17.*has 16 \(4 blocks of 4\)"
    ) as caught:
        bench.add("a", list(range(10)), 7)
    assert caught.value.param == "max_tokens"
    with pytest.raises(CapacityError) as caught:
        bench.add("b", list(range(16)), 1)
    assert caught.value.param == "prompt"
    bench.add("c", list(range(15)), None)
    with pytest.raises(CapacityError, match="16 tokens and 1 of the answer"):
        bench.add("d", list(range(16)), None)
    assert bench.scheduler.get("a") is None


def test_a_full_queue_is_overloaded():
    bench = Bench(max_waiting=2)
    bench.add("a", [1])
    bench.add("b", [1])
    with pytest.raises(OverloadedError, match="2 requests wait already, the limit is 2"):
        bench.add("c", [1])


def test_wrong_requests_are_refused():
    bench = Bench()
    bench.add("a", [1])
    with pytest.raises(ValueError, match="live already"):
        bench.add("a", [1])
    with pytest.raises(InvalidRequestError):
        bench.add("b", [])
    with pytest.raises(ValueError, match="preempted"):
        bench.add("c", [1], status=Status.PREEMPTED)
    with pytest.raises(ValueError, match="at least 1"):
        SchedulerLimits(max_batched_tokens=0)


def test_no_more_run_than_there_are_rows_and_places():
    bench = Bench(max_batched_tokens=2, max_running=8)
    for name in "abc":
        bench.add(name, [1], 5)
    for _ in range(3):
        bench.step()
    assert len(bench.scheduler.running) == 2
    bench.steps()
    bench = Bench(max_running=1)
    for name in "ab":
        bench.add(name, [1], 5)
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["a"]
    assert [r.request_id for r in bench.scheduler.waiting] == ["b"]


def test_priority_runs_first():
    bench = Bench(max_running=1)
    bench.add("a", [1], 2)
    bench.add("low", [1], 1, priority=1)
    bench.add("high", [1], 1, priority=-1)
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == []
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["a"]
    bench.steps()


def test_trap_d3_one_large_request_does_not_idle_the_pool_and_is_not_starved():
    bench = Bench(blocks=8, size=4, skip_patience=4)
    bench.add("holder", [1] * 12, 12)
    bench.step()
    large = bench.add("large", list(range(24)), 4)
    for i in range(40):
        bench.add(f"small{i}", [i, 1], 2)
    passed = 0
    while large.status is Status.WAITING:
        ids = [new.request_id for new in bench.step().added]
        passed += ids.index("large") if "large" in ids else len(ids)
    assert passed == 4
    bench.steps()
    assert large.token_ids == expected_tokens(list(range(24)), 4)


def test_blocks_that_a_prefill_still_needs_are_not_given_away():
    bench = Bench(blocks=8, size=4, max_batched_tokens=6)
    bench.add("long", list(range(20)), 2)
    other = bench.add("other", list(range(50, 62)), 2)
    bench.step()
    bench.step()
    assert other.status is Status.WAITING
    bench.steps()
    assert bench.scheduler.num_preemptions == 0
    assert other.token_ids == expected_tokens(list(range(50, 62)), 2)


def test_a_request_is_admitted_with_room_for_its_next_token():
    bench = Bench(blocks=3, size=4)
    bench.add("a", [1, 2, 3, 4], 3)
    other = bench.add("b", [5, 6, 7, 8], 3)
    bench.step()
    assert other.status is Status.WAITING
    bench.steps()
    assert bench.scheduler.num_preemptions == 0


def test_trap_d2_stalled_steps_count_steps_without_a_plan_while_somebody_waits():
    bench = Bench(blocks=4, size=4)
    assert bench.plan() is None
    assert bench.scheduler.stalled_steps == 0
    compiling = bench.add("c", [1], 2, status=Status.COMPILING)
    assert not bench.scheduler.has_work
    assert bench.plan() is None
    assert bench.scheduler.stalled_steps == 0, "a grammar is being compiled elsewhere"
    seq = bench.kv.open([1], "")  # somebody else holds the whole pool
    bench.kv.reserve(seq, 16)
    compiling.move_to(Status.WAITING)
    assert bench.plan() is None
    assert bench.plan() is None
    assert bench.scheduler.stalled_steps == 2
    bench.kv.release(seq)
    bench.steps()
    assert bench.scheduler.stalled_steps == 2


def test_a_request_without_max_tokens_that_fills_the_pool_is_reported():
    bench = Bench(blocks=2, size=4)
    request = bench.add("a", [1, 2, 3], None)
    for _ in range(20):
        if bench.step() is None:
            break
    assert bench.scheduler.exhausted == [request]
    assert request.num_computed == 8
    assert bench.scheduler.finish("a") is request
    assert bench.kv.baseline()


def test_two_requests_without_max_tokens_do_not_block_each_other_for_ever():
    bench = Bench(blocks=2, size=4)
    bench.add("a", [1, 2, 3], None)
    bench.add("b", [4], None)
    ended = []
    for _ in range(60):
        bench.step()
        for request in bench.scheduler.exhausted:
            ended.append(request.request_id)
            assert (
                request.token_ids
                == expected_tokens([1, 2, 3] if request.request_id == "a" else [4], 10)[: request.num_tokens]
            )
            bench.scheduler.finish(request.request_id)
    assert sorted(ended) == ["a", "b"]
    assert bench.kv.baseline()


def test_one_plan_at_a_time():
    bench = Bench()
    bench.add("a", [1])
    plan = bench.plan()
    with pytest.raises(RuntimeError, match="in flight"):
        bench.scheduler.schedule()
    result = bench.worker.run(plan)
    bench.commit(plan, result)
    with pytest.raises(ValueError, match="not the step in flight"):
        bench.scheduler.commit(plan, result)


@pytest.mark.parametrize(
    "output",
    [
        SampledTokens("a", 0, (1, 2)),
        SampledTokens("a", 0, (1,), 0, 1),
    ],
)
def test_an_output_that_cannot_come_from_the_plan_changes_nothing(output):
    bench = Bench()
    request = bench.add("a", [1])
    plan = bench.plan()
    with pytest.raises(ValueError, match="sampled rows"):
        bench.scheduler.commit(plan, StepResult(plan.step, (output,)))
    assert request.num_tokens == 1
    bench.commit(plan, bench.worker.run(plan))
    bench.steps()


def test_outputs_of_other_epochs_and_unknown_ids_are_dropped():
    bench = Bench()
    request = bench.add("a", [1])
    plan = bench.plan()
    outputs = (SampledTokens("a", 7, (1,)), SampledTokens("nobody", 0, (1,)))
    assert bench.scheduler.commit(plan, StepResult(plan.step, outputs)) == []
    bench.scheduler.check()
    assert (request.num_tokens, request.num_computed) == (1, 0)


def test_a_request_with_nothing_to_compute_is_a_fault_that_shows():
    bench = Bench()
    request = bench.add("a", [1, 2])
    bench.step()
    request.draft = draft_for(request, 1)
    plan = bench.plan()
    bench.scheduler.commit(plan, StepResult(plan.step, (SampledTokens("a", 0, request.draft.tokens, 1, 1),)))
    assert request.num_computed == request.num_tokens
    with pytest.raises(RuntimeError, match="should have been finished"):
        bench.scheduler.schedule()
