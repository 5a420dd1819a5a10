"""Drafts of a step: who gets one, how long, and the cuts that keep it legal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from specserve.core.plan import StepPlan, StepResult
from specserve.core.protocols import DraftContext, Drafter
from specserve.core.request import Request
from specserve.core.tree import TokenTree
from specserve.engine.faults import log_fault
from specserve.engine.live import LiveRequest
from specserve.guided.masks import longest_legal

logger = logging.getLogger(__name__)


class Controller(Protocol):
    """Decides how many tokens each request may draft, from what earlier steps cost and gave."""

    def budgets(self, requests: Sequence[Request]) -> Sequence[int]:
        """One number a request, of those that may draft in this step; 0 is a normal answer."""

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """One step's plan, its outputs (cut where answers ended) and its seconds, drafting included."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended."""


class Drafting:
    """Asks the drafter for the requests that are ready and sets `request.draft`.

    A fault of a drafter costs the drafts of that step, never a request. A fault of a request's grammar state is
    returned, to fail that request alone.
    """

    def __init__(self, drafter: Drafter | None, controller: Controller | None, limit: int, vocab_size: int) -> None:
        self._drafter = drafter
        self._controller = controller
        self._limit = limit
        self._vocab_size = vocab_size
        self.faults = 0

    def propose(self, lives: Iterable[LiveRequest]) -> list[tuple[LiveRequest, Exception]]:
        """Set drafts; the requests whose grammar state failed, with the reason."""
        if self._drafter is None or self._limit == 0:
            return []
        contexts, ready = self._contexts(lives)
        if not contexts:
            return []
        try:
            trees = self._drafter.propose(contexts)
            if len(trees) != len(contexts):
                raise ValueError("a drafter must answer with one tree a context")
        except Exception as error:
            self.faults += 1
            log_fault(logger, "drafter", error)
            return []
        failed = []
        for live, context, tree in zip(ready, contexts, trees, strict=True):
            try:
                live.request.draft = self._cut(live, tree.truncate(context.budget))
            except Exception as error:
                failed.append((live, error))
        return failed

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if self._controller is not None:
            try:
                self._controller.observe(plan, result, seconds)
            except Exception as error:
                log_fault(logger, "controller", error)

    def forget(self, request_id: str, *, ended: bool) -> None:
        """A request ended or was preempted."""
        try:
            if self._drafter is not None:
                self._drafter.forget(request_id)
            if self._controller is not None and ended:
                self._controller.forget(request_id)
        except Exception as error:
            log_fault(logger, "drafter", error)

    def _contexts(self, lives: Iterable[LiveRequest]) -> tuple[list[DraftContext], list[LiveRequest]]:
        # The token after the draft is the target's own, so a draft longer than remaining - 1 is of no use.
        caps: list[tuple[LiveRequest, int]] = []
        for live in lives:
            own = live.request.params.draft_cap()
            cap = min(self._limit if own is None else own, self._limit, live.judge.remaining - 1)
            if cap > 0 and live.request.ready_to_draft and not live.request.draft:
                caps.append((live, cap))
        budgets = self._budgets([live.request for live, _ in caps])
        contexts, ready = [], []
        for (live, cap), budget in zip(caps, budgets, strict=True):
            if min(cap, budget) > 0:
                contexts.append(DraftContext(live.request, min(cap, budget), live.matcher))
                ready.append(live)
        return contexts, ready

    def _budgets(self, requests: Sequence[Request]) -> Sequence[int]:
        if self._controller is None or not requests:
            return [self._limit] * len(requests)
        try:
            budgets = self._controller.budgets(requests)
            if len(budgets) == len(requests):
                return budgets
            raise ValueError("a controller must answer with one budget a request")
        except Exception as error:
            log_fault(logger, "controller", error)
            return [0] * len(requests)

    def _cut(self, live: LiveRequest, tree: TokenTree) -> TokenTree:
        """The draft up to the first token that is no token, that the grammar refuses, or that ends the answer."""
        for i, token in enumerate(tree.tokens):
            if not 0 <= token < self._vocab_size:
                tree = tree.truncate(i)
                break
            if token in live.judge.end_ids:
                tree = tree.truncate(i + 1)
                break
        if live.matcher is None or not tree:
            return tree
        return tree.truncate(longest_legal(live.matcher, tree.tokens))
