"""Lengths and arrivals have the paper's statistics."""

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.policies.workload import ALPACA, SHAREGPT, TRANSLATION, backlog, poisson

COUNT = 40_000


@pytest.mark.parametrize(("workload", "prompt", "output"), [(SHAREGPT, 161, 338), (ALPACA, 19, 58)])
def test_mean_lengths_are_the_papers(workload, prompt, output):
    # The standard error of a mean of 40,000 draws is below 0.8% here, so 3% is four of them.
    for seed in (1, 2):
        prompts, outputs = workload.lengths(COUNT, seed)
        assert prompts.mean() == pytest.approx(prompt, rel=0.03)
        assert outputs.mean() == pytest.approx(output, rel=0.03)
        assert prompts.min() >= 1
        assert outputs.min() >= 1
        assert (prompts + outputs).max() <= 2048
        assert len(set(prompts.tolist())) > 50, "lengths vary"


def test_sharegpts_outputs_are_as_wide_as_the_papers_reservations_say():
    _, outputs = SHAREGPT.lengths(COUNT, 3)
    assert (outputs.astype(float) ** 2).mean() / outputs.mean() == pytest.approx(644, rel=0.04)


def test_scaled_lengths_keep_their_shape():
    small = SHAREGPT.scaled(8)
    prompts, outputs = small.lengths(COUNT, 1)
    assert prompts.mean() == pytest.approx(161.31 / 8, rel=0.03)
    assert outputs.mean() == pytest.approx(337.99 / 8, rel=0.03)
    assert (prompts + outputs).max() <= 256


def test_arrivals_are_poisson():
    jobs = poisson(ALPACA, rate=20.0, seconds=1000.0, seed=1)
    assert len(jobs) == pytest.approx(20_000, abs=4 * 20_000**0.5)
    arrivals = [job.arrival for job in jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    assert arrivals[-1] <= 1000.0
    gaps = [b - a for a, b in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1), "gaps are exponential"


def test_the_same_requests_come_at_every_rate():
    slow = poisson(SHAREGPT, rate=1.0, seconds=100.0, seed=5)
    fast = poisson(SHAREGPT, rate=3.0, seconds=100.0, seed=5)
    assert len(fast) > 2 * len(slow)
    assert [(j.prompt, j.output) for j in fast[: len(slow)]] == [(j.prompt, j.output) for j in slow]
    assert [j.arrival / 3 for j in slow] == pytest.approx([j.arrival for j in fast[: len(slow)]])
    assert poisson(SHAREGPT, rate=1.0, seconds=100.0, seed=6) != slow


def test_a_shared_prefix_lengthens_every_prompt():
    plain = backlog(TRANSLATION, 20, 1)
    shared = backlog(replace(TRANSLATION, prefix=341), 20, 1)
    assert [j.prompt for j in shared] == [j.prompt + 341 for j in plain]
    assert [j.output for j in shared] == [j.output for j in plain]
