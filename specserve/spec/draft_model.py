"""DraftModelDrafter: a second, smaller model with the same vocabulary and its own paged KV drafts token by token.

It samples with the target's logits pipeline, seed and positions, so that it agrees wherever the models do
(Leviathan et al. 2023; coupled noise: Daliri, Musco, Suresh).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from specserve.core.protocols import Bitmask, DraftBackend, DraftContext, DraftRows
from specserve.core.tree import EMPTY_TREE, TokenTree
from specserve.guided.masks import allocate
from specserve.kv.manager import KVManager, SequenceKV
from specserve.kv.table import BlockTable


@dataclass(slots=True)
class _Draft:
    """One request's draft as it grows.

    Attributes:
        budget: tokens to draft; 0 while its cache is still being caught up.
        fresh: known tokens to compute first (catch-up), at least 1.
    """

    context: DraftContext
    seq: SequenceKV
    table: BlockTable
    budget: int
    fresh: int
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    accepted: int = 0  # tokens the matcher was advanced by
    open: bool = True

    def mask(self, vocab_size: int) -> Bitmask | None:
        """The matcher's mask for the next token."""
        if self.context.matcher is None:
            return None
        mask = allocate(1, vocab_size)
        self.context.matcher.fill(mask, 0)
        return mask

    def take(self, token: int, prob: float) -> None:
        """Append a drafted token; the draft ends at an end token, an illegal one, or its budget."""
        matcher = self.context.matcher
        if token < 0 or (matcher is not None and not matcher.accept(token)):
            self.open = False
            return
        self.accepted += matcher is not None
        self.tokens.append(token)
        self.probs.append(prob)
        over = token in self.ends or (matcher is not None and matcher.terminated)
        self.open = not over and len(self.tokens) < self.budget

    def finish(self, source: str) -> TokenTree:
        """Leave the matcher as it was; the chain drafted."""
        if self.accepted and self.context.matcher is not None:
            self.context.matcher.rollback(self.accepted)
            self.accepted = 0
        return TokenTree.chain(self.tokens, source, self.probs) if self.tokens else EMPTY_TREE


class DraftModelDrafter:
    """Drafts K tokens in K batched forwards of the draft model, after catching its cache up with the known tokens.

    Args:
        backend: runs the draft model.
        kv: the manager with a draft pool.
        vocab_size: of the masks.
        max_model_len: the draft model's own context; nothing is drafted past it.
        eos_ids: nothing is drafted past an end token.
        max_catch_up_rows: known tokens computed in one call at most, over all requests. A request whose catch-up is
            not complete gets no draft in that step.
    """

    name = "draft_model"

    def __init__(
        self,
        backend: DraftBackend,
        kv: KVManager,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: Collection[int] = (),
        max_catch_up_rows: int = 512,
    ) -> None:
        self._backend = backend
        self._kv = kv
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_ids = tuple(eos_ids)
        self._max_rows = max_catch_up_rows

    def propose(self, contexts: Sequence[DraftContext]) -> list[TokenTree]:
        trees = [EMPTY_TREE] * len(contexts)
        drafts = self._open(contexts)
        try:
            self._catch_up(list(drafts.values()))
            while active := [d for d in drafts.values() if d.open]:
                self._extend(active)
        finally:
            for i, draft in drafts.items():
                trees[i] = draft.finish(self.name)
        return trees

    def forget(self, request_id: str) -> None:
        """Nothing is kept: all state is in the request's own KV."""

    def _open(self, contexts: Sequence[DraftContext]) -> dict[int, _Draft]:
        """Reserve KV for each context that can be advanced, those with the least to catch up first."""
        lag = {i: _lag(c) for i, c in enumerate(contexts)}
        left = self._max_rows
        drafts = {}
        for i in sorted((i for i in lag if lag[i] > 0), key=lambda i: (lag[i], i)):
            if left == 0:
                break
            draft = self._reserve(contexts[i], min(lag[i], left), lag[i])
            if draft is not None:
                drafts[i] = draft
                left -= draft.fresh
        return drafts

    def _reserve(self, context: DraftContext, fresh: int, lag: int) -> _Draft | None:
        """Blocks for `fresh` known tokens and, if they complete the catch-up, for the draft; a short one if need be."""
        request = context.request
        budget = min(context.budget, self._max_model_len - request.num_tokens + 1)
        if budget <= 0:
            return None
        if fresh < lag:
            budget = 0
        sizes = [budget, 1] if budget > 1 else [budget]
        for size in sizes:
            # The last drafted token's KV is not written: the target decides first whether it stands.
            copies = self._kv.reserve_draft(request.kv, fresh + max(size - 1, 0))
            if copies is not None:
                if copies:
                    self._backend.copy(copies)
                ends = request.params.end_ids(self._eos_ids)
                return _Draft(context, request.kv, request.kv.draft, size, fresh, ends, open=size > 0)
        return None

    def _catch_up(self, drafts: Sequence[_Draft]) -> None:
        """Compute the known tokens; where that completes the cache, its last row gives the first drafted token."""
        if not drafts:
            return
        rows = []
        for d in drafts:
            request = d.context.request
            start = d.table.committed
            tokens = tuple(request.token_ids[start : start + d.fresh])
            mask = d.mask(self._vocab_size) if d.open else None
            rows.append(DraftRows(request.request_id, tokens, start, d.table.block_ids, d.open, mask=mask))
        for d, (token, prob) in zip(drafts, self._backend.draft(rows), strict=True):
            self._kv.commit_draft(d.seq, d.context.request.token_ids, d.fresh)
            if d.open:
                d.take(token, prob)

    def _extend(self, active: Sequence[_Draft]) -> None:
        """One more token for each open draft, in one forward."""
        rows = []
        for d in active:
            request = d.context.request
            start = request.num_tokens + len(d.tokens) - 1
            mask = d.mask(self._vocab_size)
            last = (d.tokens[-1],)
            rows.append(DraftRows(request.request_id, last, start, d.table.block_ids, True, tuple(d.tokens), mask))
        for d, (token, prob) in zip(active, self._backend.draft(rows), strict=True):
            self._kv.write_draft(d.seq, 1)
            d.take(token, prob)


def _lag(context: DraftContext) -> int:
    """Known tokens whose KV the draft's cache lacks; 0 for a request without a draft table."""
    request = context.request
    if request.kv is None or request.kv.draft is None:
        return 0
    return int(request.num_tokens - request.kv.draft.committed)
