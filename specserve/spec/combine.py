"""CombinedDrafter: drafters in order of preference, each asked for what the ones before left open."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.protocols import DraftContext, Drafter
from specserve.core.tree import EMPTY_TREE, TokenTree


class CombinedDrafter:
    """For each request the first drafter that has something to say.

    No drafter is asked for a request that switched drafts off (draft_cap() == 0) or whose budget is 0.
    """

    name = "combined"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def propose(self, contexts: Sequence[DraftContext]) -> list[TokenTree]:
        # A draft that a step left unverified still stands, and a draft cache may hold its KV: it is not drafted again.
        trees = [c.request.draft.truncate(allowed(c)) if allowed(c) > 0 else EMPTY_TREE for c in contexts]
        pending = [i for i, c in enumerate(contexts) if allowed(c) > 0 and not trees[i]]
        for drafter in self._drafters:
            if not pending:
                break
            proposed = drafter.propose([contexts[i] for i in pending])
            for i, tree in zip(pending, proposed, strict=True):
                trees[i] = tree.truncate(allowed(contexts[i]))
            pending = [i for i in pending if not trees[i]]
        return trees

    def forget(self, request_id: str) -> None:
        for drafter in self._drafters:
            drafter.forget(request_id)


def allowed(context: DraftContext) -> int:
    """The budget under the request's own cap."""
    cap = context.request.params.draft_cap()
    return context.budget if cap is None else min(cap, context.budget)
