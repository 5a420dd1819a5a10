import json

import torch

from specserve.worker.logprobs import best_ids, token_logprobs


def test_entries_are_of_the_log_softmax_best_first():
    row = torch.tensor([1.0, 3.0, 2.0, 3.0])
    expected = torch.log_softmax(row, 0)
    entry = token_logprobs(row, 0, 3)
    assert entry.token_id == 0
    assert entry.logprob == float(expected[0])
    assert entry.top_ids == (1, 3, 2), "equal ones by id"
    assert entry.top_logprobs == tuple(expected[[1, 3, 2]].tolist())


def test_no_top_entries():
    entry = token_logprobs(torch.tensor([1.0, 2.0]), 1, 0)
    assert (entry.top_ids, entry.top_logprobs) == ((), ())


def test_trap_c28_minus_infinity_is_null():
    row = torch.full((6,), float("-inf"))
    row[[2, 4]] = torch.tensor([0.0, 1.0])
    entry = token_logprobs(row, 4, 5)
    assert entry.top_ids[:2] == (4, 2)
    assert entry.top_logprobs[2:] == (None, None, None)
    json.loads(json.dumps(entry.top_logprobs, allow_nan=False))


def test_ties_at_the_edge_fall_to_the_lowest_ids():
    row = torch.zeros(5000)
    assert best_ids(row, 4).tolist() == [0, 1, 2, 3]
    assert best_ids(row, 9000).tolist() == list(range(5000))
