"""Request status moves along its table only; every preemption and end bumps the epoch and drops the draft."""

from __future__ import annotations

import itertools

import pytest

from specserve.core.request import Request, Status
from specserve.core.sampling import SamplingParams
from specserve.core.tree import EMPTY_TREE, TokenTree

ALLOWED = {
    (Status.COMPILING, Status.WAITING),
    (Status.COMPILING, Status.FINISHED),
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.RUNNING, Status.SWAPPED),
    (Status.RUNNING, Status.FINISHED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.PREEMPTED, Status.FINISHED),
    (Status.SWAPPED, Status.RUNNING),
    (Status.SWAPPED, Status.PREEMPTED),
    (Status.SWAPPED, Status.FINISHED),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Status, Status)))
def test_transitions(before: Status, after: Status) -> None:
    request = Request("r", [1, 2], SamplingParams(), status=before)
    request.draft = TokenTree.chain([5], "suffix")
    if (before, after) not in ALLOWED:
        with pytest.raises(ValueError, match="not allowed"):
            request.move_to(after)
        assert request.status is before
        return
    request.move_to(after)
    ends = after in (Status.PREEMPTED, Status.SWAPPED, Status.FINISHED)
    assert request.epoch == int(ends)
    assert (request.draft is EMPTY_TREE) == ends


def test_ready_to_draft_and_counts() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(), status=Status.RUNNING)
    request.num_computed = 2
    assert request.ready_to_draft
    request.append((7, 8))
    assert request.output_token_ids == [7, 8]
    assert not request.ready_to_draft
    request.check()
