import pytest

from specserve.core.plan import NewRequest
from specserve.core.sampling import SamplingParams
from specserve.worker.states import StateTable


def new(name, **options):
    return NewRequest(name, (1, 2, 3), 2, SamplingParams(**options), 7)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"min_tokens": 2},
        {"logprobs": 1},
        {"banned_token_ids": (3,)},
        {"logit_bias": {3: 1.0}},
        {"presence_penalty": 0.5},
        {"guided": {"regex": "a"}},
    ],
)
def test_one_that_asks_for_more_counts_until_it_leaves(options):
    table = StateTable(16, ())
    table.update([new("a"), new("b")], ())
    assert table.all_plain(["a", "b"])
    table.update([new("c", **options)], ())
    assert not table.all_plain(["a"])
    table.update([new("c", **options)], ())  # comes again after a preemption
    table.update((), ["c", "c", "unknown"])
    assert table.all_plain(["a", "b"])
    table.update([new("b", **options)], ())
    assert not table.all_plain(["a"])
    table.update([new("b")], ())
    assert table.all_plain(["a"])


def test_nothing_is_said_of_the_unknown():
    table = StateTable(16, ())
    table.update([new("a")], ())
    assert not table.all_plain(["a", "b"])
