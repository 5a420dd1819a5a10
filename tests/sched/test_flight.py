"""Flight: the plan that is being run, and what its outputs may be."""

import pytest

from specserve.core.plan import SampledTokens, StepPlan
from specserve.core.request import Status
from specserve.sched.flight import Flight, advance, check_output
from tests.fakes.sched import Bench, draft_for
from tests.fakes.worker import expected_tokens


def drafted(good, bad):
    bench = Bench()
    request = bench.add("a", [1, 2, 3], 20)
    bench.step()
    request.draft = draft_for(request, good, bad)
    return bench, request, bench.plan()


@pytest.mark.parametrize(("emitted", "accepted", "computed"), [(4, 3, 7), (1, 0, 4), (2, 2, 6), (0, 0, 4), (1, 3, 5)])
def test_advance_takes_over_what_was_computed_and_emitted(emitted, accepted, computed):
    """Of an answer that is cut, no more is accepted than emitted."""
    bench, request, plan = drafted(3, 0)
    tokens = tuple(range(emitted))
    advance(request, plan.requests[0], SampledTokens("a", 0, tokens, 3, accepted), bench.kv)
    assert request.token_ids[4:] == list(tokens)
    assert request.num_computed == request.kv.target.committed == computed
    bench.kv.rollback(request.kv)


@pytest.mark.parametrize(
    ("tokens", "accepted", "epoch", "right"),
    [(3, 2, 0, True), (4, 2, 0, False), (3, 3, 0, False), (9, 9, 1, True)],
)
def test_an_output_has_no_more_than_the_rows_that_were_sampled_and_drafted(tokens, accepted, epoch, right):
    _, _, plan = drafted(2, 0)
    output = SampledTokens("a", epoch, tuple(range(tokens)), 2, accepted)
    if right:
        check_output(plan.requests[0], output)  # another epoch's is dropped, whatever it has
        check_output(plan.requests[0], None)
    else:
        with pytest.raises(ValueError, match=f"{tokens} tokens, {accepted} accepted from 3 sampled rows and 2 drafted"):
            check_output(plan.requests[0], output)


def test_a_flight_holds_its_requests_and_not_others_of_the_same_id():
    bench = Bench()
    request = bench.add("a", [1])
    flight = Flight(StepPlan(1, ()), [request])
    assert flight.holds(request)
    assert not flight.holds(bench.request("a", [1]))


def test_what_ends_in_flight_beside_the_plan_is_released_at_once():
    bench = Bench(blocks=2, size=4)
    waiting = [bench.add("a", [1, 2], 2), bench.add("b", [3, 4, 5, 6, 7], 2)]
    plan = bench.plan()
    assert [entry.request_id for entry in plan.requests] == ["a"]
    bench.scheduler.finish("b")
    bench.scheduler.check()
    bench.commit(plan, bench.worker.run(plan))
    bench.steps()
    assert waiting[0].token_ids == expected_tokens([1, 2], 2)
    assert waiting[1].status is Status.FINISHED
    assert bench.kv.baseline()


def test_the_last_steps_time_teaches_the_budget_what_was_in_it():
    bench = Bench()
    seen = []
    bench.scheduler.budget = type("Seen", (), {"observe": lambda _, *what: seen.append(what), "rows": lambda *_: 99})()
    bench.scheduler.observe(1.0)
    assert seen == [], "there was no step"
    bench.add("a", [1], 20)
    bench.step()
    bench.add("b", [1, 2, 3], 20)
    bench.step()
    bench.scheduler.observe(2.0, 0.5)
    assert seen == [(1, 3, 1.5)]
