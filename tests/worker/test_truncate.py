import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.worker.truncate import min_p, top_k, top_p, truncate

NEVER = float("-inf")


def kept(row):
    return torch.nonzero(torch.isfinite(row)).flatten().tolist()


def ranked(values):
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


ROWS = st.lists(st.sampled_from([-4.0, -1.5, -1.0, 0.0, 0.25, 1.0, 2.0, 5.0]), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(1, 35))
def test_top_k_keeps_the_k_best_and_ties_by_id(values, k):
    row = torch.tensor(values)
    top_k(row, k)
    assert kept(row) == sorted(ranked(values)[:k])
    assert row[kept(row)].tolist() == [values[i] for i in kept(row)]


@settings(max_examples=200, deadline=None)
@given(ROWS, st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_p(values, p):
    row = torch.tensor(values)
    top_p(row, p)
    probs = torch.softmax(torch.tensor(values, dtype=torch.float64), 0)
    expected, total = [], 0.0
    for i in ranked(values):
        expected.append(i)
        total += float(probs[i])
        if total >= p - 1e-12:
            break
    assert kept(row) == sorted(expected) or abs(total - p) < 1e-9


def test_min_p_is_relative_to_the_best():
    row = torch.log(torch.tensor([0.5, 0.26, 0.24]))
    min_p(row, 0.5)
    assert kept(row) == [0, 1]


def test_top_p_works_on_what_top_k_leaves():
    row = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    truncate(row, k=2, p=0.5, smallest=0.0)
    assert kept(row) == [0]  # 0.4 / 0.7 reaches 0.5


@pytest.mark.parametrize("value", [NEVER, float("nan")])
def test_a_row_without_a_finite_entry_stays(value):
    row = torch.full((8,), value)
    truncate(row, k=2, p=0.5, smallest=0.5)
    assert not torch.isfinite(row).any()


def test_masked_entries_stay_masked():
    row = torch.tensor([NEVER, 1.0, NEVER, 0.5])
    truncate(row, k=3, p=0.99, smallest=0.01)
    assert kept(row) == [1, 3]
