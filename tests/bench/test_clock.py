"""The cost of a step, and its parts fitted to timed runs."""

import pytest

from bench.policies.clock import Machine, Measured, a100_13b, fit


def test_a_steps_parts_add_up():
    machine = Machine("m", base=1.0, per_row=0.1, per_context=0.01, slots=100)
    assert machine.seconds(10, 200) == pytest.approx(1.0 + 1.0 + 2.0)


def test_the_papers_server():
    machine = a100_13b()
    assert machine.slots == 15_728, "table 1: 15.7K slots"
    assert 0.02 < machine.seconds(1, 100) < 0.03


def test_fit_finds_the_parts_of_exact_times():
    shapes = [(24, 24, 700), (24, 200, 5000), (24, 900, 20_000), (30, 1000, 100), (5, 50, 50_000)]
    runs = [Measured(s, r, c, 0.02 * s + 0.003 * r + 1e-6 * c) for s, r, c in shapes]
    assert fit(runs) == pytest.approx((0.02, 0.003, 1e-6))


def test_a_part_is_never_negative():
    shapes = [(24, 24, 700), (24, 200, 5000), (24, 900, 20_000), (30, 1000, 100)]
    runs = [Measured(s, r, c, 0.02 * s + 0.003 * r - 1e-6 * c) for s, r, c in shapes]
    base, per_row, per_context = fit(runs)
    assert per_context == 0.0
    # The other two are the best without it: no change of either makes the relative errors smaller.
    errors = [1 - (base * r.steps + per_row * r.rows) / r.seconds for r in runs]
    assert sum(e * r.steps / r.seconds for e, r in zip(errors, runs, strict=True)) == pytest.approx(0, abs=1e-9)
    assert sum(e * r.rows / r.seconds for e, r in zip(errors, runs, strict=True)) == pytest.approx(0, abs=1e-9)
