"""WorkerStates: which sampling states the worker has, and what the next plan must tell it."""

from __future__ import annotations

from collections.abc import Iterable

from specserve.core.plan import NewRequest, StepPlan
from specserve.core.request import Request


class WorkerStates:
    """Mirror of the worker's sampling states. They follow the KV: added when a request gets some, removed after."""

    __slots__ = ("_again", "_known", "_removed")

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._removed: dict[str, None] = {}  # to be dropped with the next plan
        self._again: dict[str, Request] = {}  # to be added, or added once more, with the next plan

    def forget(self, request_id: str) -> None:
        """The request ended or gave its KV up."""
        self._again.pop(request_id, None)
        if request_id in self._known:
            del self._known[request_id]
            self._removed[request_id] = None

    def again(self, request: Request) -> None:
        """Tell the worker of a running request with the next plan: it is new, or its history is another now."""
        self._again[request.request_id] = request

    def changes(self, started: Iterable[Request]) -> tuple[tuple[NewRequest, ...], tuple[str, ...]]:
        """`added` and `removed` of the plan that starts these requests. An added id replaces, so is not removed."""
        added = tuple([_describe(r) for r in (*self._again.values(), *started)])
        for new in added:
            self._known[new.request_id] = None
            self._removed.pop(new.request_id, None)
        removed = tuple(self._removed)
        self._removed.clear()
        self._again.clear()
        return added, removed

    def abandoned(self, plan: StepPlan, running: Iterable[Request]) -> None:
        """The worker may or may not have seen the plan's changes: tell it again."""
        added = {new.request_id for new in plan.added}
        self._again.update((r.request_id, r) for r in running if r.request_id in added)
        self._removed.update((i, None) for i in plan.removed if i not in self._known)

    def check(self, running: Iterable[Request]) -> None:
        """Assert the invariants; tests call it after every step."""
        assert not self._known.keys() & self._removed.keys()
        ids = {r.request_id for r in running}
        assert self._known.keys() | self._again.keys() == ids, "the worker knows those that own KV, or is told of them"


def _describe(request: Request) -> NewRequest:
    return NewRequest(
        request.request_id, tuple(request.token_ids), request.num_prompt_tokens, request.params, request.seed
    )
