"""Scheduler: continuous batching with chunked prefill and drafts, over paged KV.

`schedule()` decides one step and reserves its KV; `commit()` is the only place where state changes after a forward.
One plan is in flight at a time. Iteration-level scheduling is Orca's (Yu et al. 2022, section 3.1), chunked prefill
beside decodes Sarathi-Serve's (Agrawal et al. 2024, section 4).
"""

from __future__ import annotations

from specserve.core.errors import OverloadedError
from specserve.core.plan import SampledTokens, ScheduledRequest, StepPlan, StepResult
from specserve.core.request import Request
from specserve.core.tree import EMPTY_TREE
from specserve.kv.manager import KVManager, SequenceKV
from specserve.sched.limits import SchedulerLimits, check_new
from specserve.sched.policy import WaitingQueue
from specserve.sched.roster import Roster
from specserve.sched.step import Step

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """Owns every live request. Not thread-safe: one engine loop drives it.

    Attributes:
        exhausted: requests that the last `schedule()` found to fill the whole pool, so that they can never take
            another token (only possible without max_tokens). The engine ends them.
        stalled_steps: calls of `schedule()` that planned nothing although a request waits that is ready to run.
    """

    __slots__ = (
        "_deferred",
        "_plan",
        "_planned",
        "_requests",
        "_roster",
        "_step",
        "exhausted",
        "kv",
        "limits",
        "stalled_steps",
    )

    def __init__(self, limits: SchedulerLimits, kv: KVManager) -> None:
        self.limits = limits
        self.kv = kv
        self.exhausted: list[Request] = []
        self.stalled_steps = 0
        self._requests: dict[str, Request] = {}
        self._roster = Roster(kv, WaitingQueue(limits.skip_window, limits.skip_patience))
        self._step = 0
        self._plan: StepPlan | None = None
        self._planned: list[Request] = []  # of the plan in flight, in its order
        self._deferred: list[SequenceKV] = []  # of requests that ended while their plan was in flight

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that own KV, in the order in which they are served."""
        return tuple(self._roster.running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests without KV (waiting, compiling, preempted), in admission order."""
        return tuple(self._roster.waiting)

    @property
    def num_preemptions(self) -> int:
        """Since the start."""
        return self._roster.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether `schedule()` may find something to do; requests whose grammar is being compiled do not count."""
        return bool(self._roster.running) or self._roster.waiting.has_ready

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request (WAITING, or COMPILING until its grammar is ready and the caller moves it to WAITING).

        Raises:
            CapacityError: it could never fit the KV pool, even alone.
            OverloadedError: the queue is full.
            InvalidRequestError: it has no tokens.
            ValueError: its id is live, or its status is another.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is live already")
        check_new(request, self.kv)
        waiting = self._roster.waiting
        if len(waiting) >= self.limits.max_waiting:
            raise OverloadedError(
                f"{len(waiting)} requests wait already, the limit is {self.limits.max_waiting}; try again later"
            )
        self._requests[request.request_id] = request
        waiting.push(request)

    def finish(self, request_id: str) -> Request | None:
        """End a request in whatever state it is and give back all that it holds. None for an unknown id.

        While a plan that names it is in flight its blocks are kept until that plan is committed or abandoned.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        seq = self._roster.end(request)
        if seq is not None:
            if any(planned is request for planned in self._planned):
                self._deferred.append(seq)
            else:
                self.kv.release(seq)
        return request

    def schedule(self) -> StepPlan | None:
        """Decide the next step and reserve its KV (see Step); None when nothing can run.

        Raises:
            RuntimeError: the last plan is neither committed nor abandoned, or a request has nothing left to compute.
        """
        if self._plan is not None:
            raise RuntimeError(f"plan {self._plan.step} is in flight: commit or abandon it first")
        step = Step(self.limits, self._roster)
        step.decide()
        self.exhausted = step.exhausted
        if not step.rows:
            self.stalled_steps += self.has_work
            return None
        self._step += 1
        added, removed = self._roster.states.changes(step.started)
        self._plan = StepPlan(
            step=self._step,
            requests=tuple([row.build() for row in step.rows]),
            added=added,
            removed=removed,
            copies=tuple([copy for row in step.rows if row.copies for copy in row.copies]),
        )
        self._planned = [row.request for row in step.rows]
        return self._plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take a step's outcome over: the only place where state changes after a forward.

        Outputs of requests that ended since (an older epoch, an unknown id) are dropped. A planned request without
        an output is not advanced: its rows are computed again.

        Returns:
            The requests that advanced, in the plan's order.

        Raises:
            ValueError: this is not the plan in flight, or an output cannot come from it. Nothing is changed.
        """
        if plan is not self._plan or result.step != plan.step:
            raise ValueError(f"plan {plan.step}, result {result.step}: not the step in flight")
        outputs = {output.request_id: output for output in result.outputs}
        for entry in plan.requests:
            _check_output(entry, outputs.get(entry.request_id))
        advanced = []
        for entry, request in zip(plan.requests, self._planned, strict=True):
            if request.epoch != entry.epoch:
                continue  # it ended since
            output = outputs.get(entry.request_id)
            if output is not None and output.epoch == entry.epoch:
                self._advance(request, entry, output)
                advanced.append(request)
            request.draft = EMPTY_TREE
            self.kv.rollback(request.kv)
        self._end_plan()
        return advanced

    def _advance(self, request: Request, entry: ScheduledRequest, output: SampledTokens) -> None:
        emitted = output.token_ids
        accepted = min(output.num_accepted, len(emitted))
        request.append(emitted)
        self.kv.commit(request.kv, request.token_ids, len(entry.token_ids) - len(entry.draft) + accepted)
        request.num_computed = request.kv.target.committed

    def abandon(self, plan: StepPlan) -> None:
        """The step failed: take its reservations back. Its requests go on as if it had never been planned.

        Whether the worker saw the plan is unknown, so later plans may remove states again, or ones never added.
        """
        if plan is not self._plan:
            raise ValueError(f"plan {plan.step} is not in flight")
        live = [r for r in self._planned if r.kv is not None]
        for request in live:
            request.draft = EMPTY_TREE
            self.kv.rollback(request.kv)
        self._roster.states.abandoned(plan, live)
        self._end_plan()

    def _end_plan(self) -> None:
        for seq in self._deferred:
            self.kv.release(seq)
        self._deferred.clear()
        self._planned = []
        self._plan = None

    def check(self) -> None:
        """Assert the invariants, incl. the pools against the tables; tests call it after every step."""
        roster = self._roster
        self.kv.check()
        roster.check()
        roster.states.check(roster.running)
        live = [*roster.running, *roster.waiting]
        assert {r.request_id: r for r in live} == self._requests
        assert len(live) == len(self._requests)
        assert len(roster.running) <= self.limits.places
        assert self._plan is not None or not (self._deferred or self._planned)
        assert self.kv.num_sequences >= len(roster.running) + len(self._deferred)


def _check_output(entry: ScheduledRequest, output: SampledTokens | None) -> None:
    if output is None or output.epoch != entry.epoch:
        return
    if len(output.token_ids) > entry.num_logits or output.num_accepted > len(entry.draft):
        raise ValueError(
            f"request {entry.request_id}: {len(output.token_ids)} tokens, {output.num_accepted} accepted from "
            f"{entry.num_logits} sampled rows and {len(entry.draft)} drafted"
        )
