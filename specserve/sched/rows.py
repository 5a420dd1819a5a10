"""Rows: what one step computes for one request while the step is being put together."""

from __future__ import annotations

from specserve.core.plan import BlockCopy, ScheduledRequest
from specserve.core.request import Request
from specserve.core.tree import EMPTY_TREE


class Rows:
    """One request's share of the step.

    Attributes:
        known: known tokens to compute (>= 1).
        drafted: nodes of the pending draft to verify after them.
        copies: copy-on-write of its tables, to run before the forward.
    """

    __slots__ = ("copies", "drafted", "known", "request")

    def __init__(self, request: Request, copies: tuple[BlockCopy, ...]) -> None:
        self.request = request
        self.known = 1
        self.drafted = 0
        self.copies = copies

    def build(self) -> ScheduledRequest:
        """The plan's entry. Its block table is the live list: it does not change until the plan is committed."""
        request = self.request
        start = request.num_computed
        end = start + self.known
        draft = request.draft.truncate(self.drafted) if self.drafted else EMPTY_TREE
        return ScheduledRequest(
            request.request_id,
            request.epoch,
            (*request.token_ids[start:end], *draft.tokens),
            start,
            request.kv.target.block_ids,
            0 if end < len(request.token_ids) else self.drafted + 1,
            draft,
        )


def draft_limit(request: Request, max_model_len: int | None) -> int:
    """Most nodes of the pending draft that can be of use, for a request with one known token left to compute.

    No more than the answer may still have beside the target's own next token; none outside of the model's context.
    """
    limit = len(request.draft)
    max_tokens = request.params.max_tokens
    if max_tokens is not None:
        limit = min(limit, max_tokens - request.num_output_tokens - 1)
    if max_model_len is not None:
        limit = min(limit, max_model_len - request.num_tokens)
    return max(limit, 0)
