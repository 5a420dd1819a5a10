"""A prefix that a running request is computing is not computed a second time beside it."""

from specserve.core.request import Status
from tests.fakes.sched import Bench
from tests.fakes.worker import expected_tokens

PREFIX = [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]  # three blocks of 4


def rows_of(bench, name):
    """Prompt rows computed for a request, from the plans that the worker ran."""
    return sum(len(r.token_ids) for plan in bench.plans for r in plan.requests if r.request_id == name)


def bench_of(**options):
    bench = Bench(blocks=64, size=4, **options)
    bench.plans = []
    run = bench.worker.run
    bench.worker.run = lambda plan: (bench.plans.append(plan), run(plan))[1]
    return bench


def test_later_ones_wait_for_the_first_and_share_its_blocks():
    bench = bench_of(max_batched_tokens=64)
    requests = [bench.add(f"r{i}", [*PREFIX, i % 5, 3], 3) for i in range(6)]
    bench.step()
    assert [r.status for r in requests] == [Status.RUNNING] + [Status.WAITING] * 5
    bench.step()
    assert all(r.status is Status.RUNNING for r in requests)
    assert [r.num_cached for r in requests] == [0] + [12] * 5
    bench.steps()
    for request in requests:
        assert request.token_ids == expected_tokens(request.token_ids[: request.num_prompt_tokens], 3)
    assert rows_of(bench, "r1") == 2 + 2, "the rest of its prompt, and two of its three tokens"


def test_a_chunked_prefix_is_waited_for_to_its_end():
    bench = bench_of(max_batched_tokens=5)
    first = bench.add("a", [*PREFIX, 0], 2)
    second = bench.add("b", [*PREFIX, 1], 2)
    while first.num_computed < len(PREFIX):
        assert second.status is Status.WAITING
        bench.step()
    bench.step()
    assert second.num_cached == len(PREFIX)


def test_nobody_waits_for_what_the_cache_would_not_give():
    for options in ({"prefix_cache": False}, {"namespaces": True}, {"short": True}):
        bench = bench_of(max_batched_tokens=64, prefix_cache=options.get("prefix_cache", True))
        bench.add("a", [*PREFIX, 0], 2)
        prompt = PREFIX[:4] if "short" in options else [*PREFIX, 1]  # its only full block holds its last token
        second = bench.add("b", prompt, 2, namespace="other" if "namespaces" in options else "")
        bench.step()
        assert second.status is Status.RUNNING, options


def test_what_holds_others_up_may_end_or_give_way():
    for leave in ("finish", "preempt"):
        bench = bench_of(max_batched_tokens=6)
        first = bench.add("a", [*PREFIX, 0], 2)
        second = bench.add("b", [*PREFIX, 1], 2)
        bench.step()
        if leave == "finish":
            bench.scheduler.finish("a")
        else:
            bench.scheduler.preempt(first)
        bench.steps()
        assert second.token_ids == expected_tokens([*PREFIX, 1], 2)
        assert bench.kv.baseline()
