"""Small simulations: exact where they can be worked out by hand, else in the paper's order."""

from itertools import pairwise

import pytest

from bench.policies.clock import Machine
from bench.policies.outcome import PARTS
from bench.policies.simulator import POLICIES, highest_rate, simulate
from bench.policies.workload import SHAREGPT, Job, backlog, poisson

SMALL = SHAREGPT.scaled(8)
# Steps that take the same time whatever they compute: batches then are all that counts.
FLAT = Machine("flat", base=1.0, per_row=0.0, per_context=0.0, slots=1952, max_tokens=256)


@pytest.fixture(scope="module")
def outcomes():
    jobs = backlog(SMALL, 150, 1)
    return {policy: simulate(policy, FLAT, jobs) for policy in POLICIES}


def falling(values):
    return all(a < b for a, b in pairwise(values[p] for p in POLICIES))


def test_throughput_is_in_the_papers_order(outcomes):
    assert falling({p: o.throughput for p, o in outcomes.items()})


def test_memory_is_in_the_papers_order(outcomes):
    assert falling({p: o.memory.shares(FLAT.slots)[PARTS[0]] for p, o in outcomes.items()})
    assert outcomes["orca max"].memory.batch == pytest.approx(7, abs=0.01), "1952 // 256"
    assert outcomes["paged"].memory.batch > 2 * outcomes["orca oracle"].memory.batch


def test_rates_are_in_the_papers_order():
    def latency(policy, rate):
        return simulate(policy, FLAT, poisson(SMALL, rate, 200.0, 1)).normalised_latency

    found = {p: highest_rate(lambda r, p=p: latency(p, r), 5.0, 0.3, tolerance=0.1).rate for p in POLICIES}
    assert falling(found)


def test_memory_shares_are_shares(outcomes):
    for policy, outcome in outcomes.items():
        shares = outcome.memory.shares(FLAT.slots)
        assert sum(shares.values()) == pytest.approx(1)
        assert all(-1e-9 <= s <= 1 for s in shares.values()), policy
    oracle = outcomes["orca oracle"].memory.shares(FLAT.slots)
    assert oracle["internal fragmentation"] == 0, "nothing is reserved that is not used"


def test_paged_wastes_only_the_rest_of_last_blocks():
    # One request at a time beside one that waits: 20 positions in blocks of 16 in a pool of 2.
    machine = Machine("one", base=1.0, per_row=0.0, per_context=0.0, slots=32, max_tokens=32)
    outcome = simulate("paged", machine, [Job(0.0, 20, 4), Job(0.0, 20, 4)])
    # Committed after the four steps of the first request: 20, 21, 22, 23 of 32 slots.
    assert outcome.memory.seconds == 4
    assert outcome.memory.of_allocated == pytest.approx((20 + 21 + 22 + 23) / (4 * 32))
    assert outcome.makespan == 8


def test_orca_by_hand():
    # 64 slots under Oracle: 20 + 4 takes a region of 32, so two run and the third waits for the first to end.
    machine = Machine("hand", base=1.0, per_row=0.5, per_context=0.0, slots=64)
    jobs = [Job(0.0, 20, 4), Job(0.0, 20, 8), Job(0.0, 10, 2)]
    outcome = simulate("orca oracle", machine, jobs)
    # Step 1 has 40 rows, steps 2-4 two each, step 5 one and the third's ten, step 6 two, steps 7 and 8 one.
    ends = [1 + 20.0, 0, 0]
    ends[0] += 3 * 2.0
    ends[2] = ends[0] + (1 + 5.5) + 2.0
    ends[1] = ends[2] + 2 * 1.5
    assert sorted(outcome.latencies) == sorted(zip(ends, (4, 8, 2), strict=True))
    # Somebody waits in the first four steps only: 20..23 tokens of each, 24 and 28 needed, regions of 32.
    assert outcome.memory.batch == 2
    assert outcome.memory.allocated == pytest.approx(64 * 27.0)
    assert outcome.memory.tokens == pytest.approx(40 * 21.0 + (42 + 44 + 46) * 2.0)


def test_static_batches_by_hand():
    # Two fit; the batch waits for its longest, and prompts are padded to the longest.
    machine = Machine("hand", base=1.0, per_row=0.5, per_context=0.0, slots=64, max_tokens=32)
    outcome = simulate("static", machine, [Job(0.0, 4, 2), Job(0.0, 8, 5), Job(0.0, 6, 3)])
    first = (1 + 8.0) + 4 * 2.0
    second = first + (1 + 3.0) + 2 * 1.5
    assert outcome.latencies == [(first, 2), (first, 5), (second, 3)]
    assert outcome.normalised_latency == pytest.approx((first / 2 + first / 5 + second / 3) / 3)


def test_requests_wait_for_their_arrival():
    for policy in POLICIES:
        outcome = simulate(policy, FLAT, [Job(0.0, 4, 2), Job(100.0, 4, 2)])
        assert outcome.latencies == [(2.0, 2), (2.0, 2)], policy
        assert outcome.makespan == 102.0
        assert outcome.memory.seconds == 0, "nobody waited"


def test_a_shared_prefix_is_computed_once():
    machine = Machine("rows", base=0.0, per_row=1.0, per_context=0.0, slots=1024, max_tokens=256, max_rows=64)
    jobs = [Job(100.0 * i, 64 + 5, 2) for i in range(4)]
    cold = simulate("paged", machine, jobs, prefix=64)
    warm = simulate("paged", machine, jobs, prefix=64, prefix_cache=True)
    assert sorted(cold.latencies) == [(70.0, 2)] * 4
    assert sorted(warm.latencies) == [(6.0, 2)] * 3 + [(70.0, 2)]


def test_a_preempted_request_still_ends():
    machine = Machine("tight", base=1.0, per_row=0.0, per_context=0.0, slots=96, max_tokens=96)
    outcome = simulate("paged", machine, [Job(0.0, 16, 64), Job(0.0, 16, 64)])
    assert outcome.preemptions > 0
    assert len(outcome.latencies) == 2


def test_the_search_ends_at_the_limit():
    tried = []

    def latency(rate):
        tried.append(rate)
        return rate / 7

    for start in (0.1, 7.0, 500.0):
        curve = highest_rate(latency, 1.0, start, tolerance=0.01)
        assert 7 / 1.02 < curve.rate <= 7.0
        assert set(curve.points) <= set(tried)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="orca max"):
        simulate("orca best", FLAT, [])
