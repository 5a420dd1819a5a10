"""Drafts: verified beside the last token, shrunk to what fits, cut where the answer ends."""

from specserve.core.plan import SampledTokens, StepResult
from specserve.core.request import Status
from tests.fakes.sched import Bench, draft_for
from tests.fakes.worker import expected_tokens


def rows(plan):
    return {r.request_id: len(r.token_ids) for r in plan.requests}


def test_every_running_request_gets_a_row_whatever_the_drafts():
    bench = Bench(max_batched_tokens=8)
    bench.add("a", [1, 2])
    bench.add("b", [3, 4])
    bench.step()
    bench.add("long", list(range(20)))
    bench.step()
    for name in "ab":
        request = bench.scheduler.get(name)
        request.draft = draft_for(request, 5)
    assert rows(bench.step()) == {"a": 3, "b": 1, "long": 4}


def test_drafts_do_not_keep_new_requests_out():
    bench = Bench(max_batched_tokens=4)
    first = bench.add("a", [1, 2], 20)
    bench.step()
    bench.add("b", [3, 4], 20)
    first.draft = draft_for(first, 6)
    assert rows(bench.step()) == {"a": 2, "b": 2}
    alone = Bench(max_batched_tokens=4)
    first = alone.add("a", [1, 2], 20)
    alone.step()
    first.draft = draft_for(first, 6)
    assert rows(alone.step()) == {"a": 4}


def test_accepted_and_rejected_drafts():
    bench = Bench()
    request = bench.add("a", [1, 2, 3], 20)
    bench.step()
    start = request.num_tokens
    request.draft = draft_for(request, 2, 4)
    plan = bench.step()
    assert plan.requests[0].start == start - 1
    assert len(plan.requests[0].draft) == 6
    assert request.num_tokens == start + 3
    assert request.num_computed == start + 2
    assert len(request.kv.target.block_ids) == 2, "what the rejected tokens took is free again"
    assert not request.draft
    assert request.ready_to_draft
    assert request.token_ids == expected_tokens([1, 2, 3], 4)


def test_a_draft_waits_until_only_the_last_token_is_left():
    bench = Bench(max_batched_tokens=4)
    request = bench.add("a", list(range(12)))
    bench.step()
    request.draft = draft_for(request, 3)
    assert rows(bench.step()) == {"a": 4}


def test_trap_a18_a_draft_shrinks_to_what_is_left_of_the_answer_and_the_context():
    bench = Bench(max_model_len=12)
    request = bench.add("a", list(range(9)), 10)
    bench.step()
    request.draft = draft_for(request, 5)
    plan = bench.plan()
    assert len(plan.requests[0].draft) == 2, "position 12 is outside of the context"
    bench.commit(plan, bench.worker.run(plan))
    assert request.token_ids == expected_tokens(list(range(9)), 4)


def test_trap_a18_a_draft_shrinks_to_the_free_blocks():
    bench = Bench(blocks=3, size=4)
    request = bench.add("a", list(range(7)), 5)
    other = bench.add("b", [1, 2], 2)
    bench.step()
    request.draft = draft_for(request, 3)
    plan = bench.step()
    assert rows(plan) == {"a": 1, "b": 1}
    assert bench.scheduler.num_preemptions == 0
    bench.steps()
    assert request.token_ids == expected_tokens(list(range(7)), 5)
    assert other.token_ids == expected_tokens([1, 2], 2)


def test_nothing_is_drafted_past_max_tokens():
    bench = Bench()
    request = bench.add("a", [1, 2], 3)
    bench.step()
    request.draft = draft_for(request, 5)
    plan = bench.step()
    assert len(plan.requests[0].draft) == 1
    assert request.status is Status.FINISHED


def test_trap_d11_text_of_a_rejected_draft_is_not_in_the_cache():
    bench = Bench()
    request = bench.add("a", [1, 2, 3], 4)
    bench.step()
    draft = draft_for(request, 1, 4)
    request.draft = draft
    text = [*request.token_ids, *draft.tokens]
    bench.step()
    bench.scheduler.finish("a")
    probe = bench.add("b", [*text, 0, 0], 3)
    bench.steps()
    assert probe.num_cached == 4
    assert probe.token_ids == expected_tokens([*text, 0, 0], 3)


def test_trap_a16_an_answer_cut_inside_a_draft_keeps_only_what_counts():
    bench = Bench()
    request = bench.add("a", [1, 2, 3], 8)
    bench.step()
    request.draft = draft_for(request, 6)
    plan = bench.plan()
    bench.worker.run(plan)
    tokens = plan.requests[0].draft.tokens[:2]
    bench.scheduler.commit(plan, StepResult(plan.step, (SampledTokens("a", 0, tokens, 6, 6),)))
    assert request.num_computed == request.num_tokens == 6
    bench.scheduler.finish("a")
    assert bench.kv.target.num_published == 1
    assert bench.kv.baseline()
