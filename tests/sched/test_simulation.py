"""Whole runs with random load: every request ends with exactly the tokens that it yields alone."""

import pytest

from tests.fakes.load import Load

KINDS = ("done", "searches", "preemptions", "swapped", "forced", "abandoned", "abort running", "abort waiting")


def run(seeds, num_requests):
    counts = {}
    for seed in seeds:
        load = Load(seed, num_requests)
        load.run()
        for name, number in load.counts.items():
            counts[name] = counts.get(name, 0) + number
    return counts


@pytest.mark.parametrize("group", range(4))
def test_random_load_with_families_drafts_swaps_aborts_and_failed_plans_in_tiny_pools(group):
    counts = run(range(group * 12, group * 12 + 12), 20)
    for kind in KINDS:
        assert counts[kind] > 0, f"{kind}: never happened"


@pytest.mark.parametrize("seed", [18, 308, 480, 252, 349, 673, 100638])
def test_loads_that_found_faults(seed):
    run([seed], 30 if seed > 100_000 else 25)


@pytest.mark.slow
def test_trap_d7_no_block_drifts_over_2000_requests():
    counts = run(range(1000, 1010), 300)
    for kind in ("abort swapped", "abort preempted", "exhausted", *KINDS):
        assert counts[kind] > 0, f"{kind}: never happened"
