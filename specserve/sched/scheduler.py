"""Scheduler: continuous batching with chunked prefill and drafts, over paged KV.

`schedule()` decides one step and reserves its KV; `commit()` is the only place where state changes after a forward.
One plan is in flight at a time. Iteration-level scheduling is Orca's (Yu et al. 2022, section 3.1), chunked prefill
beside decodes Sarathi-Serve's (Agrawal et al. 2024, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.errors import OverloadedError
from specserve.core.plan import StepPlan, StepResult
from specserve.core.request import Request, Status
from specserve.core.tree import EMPTY_TREE
from specserve.kv.manager import KVManager
from specserve.sched.budget import TokenBudget
from specserve.sched.flight import Flight, advance, check_output
from specserve.sched.limits import SchedulerLimits, check_new
from specserve.sched.policy import WaitingQueue
from specserve.sched.preempt import Preemption
from specserve.sched.roster import Roster
from specserve.sched.step import Step

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """Owns every live request. Not thread-safe: one engine loop drives it.

    Args:
        preemption: how KV gives way; None chooses by measured costs.
        budget: rows of prompt chunks beside decodes; None for as many as a step has.

    Attributes:
        exhausted: requests that the last `schedule()` found to fill the whole pool, so that they can never take
            another token (only possible without max_tokens). The engine ends them.
        stalled_steps: calls of `schedule()` that planned nothing although a request waits that is ready to run.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        *,
        preemption: Preemption | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.preemption = preemption or Preemption()
        self.budget = budget or TokenBudget(limits.max_batched_tokens, 0)
        self.exhausted: list[Request] = []
        self.stalled_steps = 0
        self._requests: dict[str, Request] = {}
        self._roster = Roster(kv, WaitingQueue(limits.skip_window, limits.skip_patience))
        self._step = 0
        self._flight: Flight | None = None
        self._last: Flight | None = None  # the one committed last

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that own KV, in the order in which they are served."""
        return tuple(self._roster.running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests without KV blocks (waiting, compiling, preempted, swapped), in admission order."""
        return tuple(self._roster.waiting)

    @property
    def num_preemptions(self) -> int:
        """Since the start."""
        return self._roster.num_preemptions

    @property
    def num_swapped(self) -> int:
        """Of the preemptions, those that moved the KV to the host pool."""
        return self._roster.num_swapped

    @property
    def has_work(self) -> bool:
        """Whether `schedule()` may find something to do; requests whose grammar is being compiled do not count."""
        roster = self._roster
        return bool(roster.running or roster.swap_out) or roster.waiting.has_ready

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
        self.add_all((request,))

    def add_all(self, requests: Sequence[Request]) -> None:
        """Queue the members of one family, or none of them; raises what `add` does."""
        waiting = self._roster.waiting
        for request in requests:
            if request.request_id in self._requests:
                raise ValueError(f"request {request.request_id} is live already")
            check_new(request, self.kv, self.limits)
        if len(waiting) + len(requests) > self.limits.max_waiting:
            raise OverloadedError(
                f"{len(waiting)} requests wait already, the limit is {self.limits.max_waiting}; try again later"
            )
        for request in requests:
            self._adopt(request)
            waiting.push(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Add a member of `parent`'s family that goes on from all that is computed of it, copy-on-write.

        `child` is WAITING, and its tokens begin with those computed. It runs at once if `parent` does and there is a
        place; otherwise it is queued. Not while a plan is in flight.
        """
        self._must_be_down()
        self._adopt(child)
        self._roster.fork(parent, child, self.limits.places)

    def preempt(self, request: Request) -> None:
        """Make a running request, with its beams, give its KV up now, as if others needed it.

        Where it is swapped the next plan reads it: nothing may be drafted for others between this and `schedule`.
        """
        self._must_be_down()
        self._roster.preempt(request, self.preemption, self.budget.seconds_per_row)

    def revise(self, request: Request) -> None:
        """The sampling state of a running request is sent again with the next plan: its tokens were changed."""
        if request.status is Status.RUNNING:
            self._roster.states.again(request)

    def _must_be_down(self) -> None:
        if self._flight is not None:
            raise RuntimeError(f"plan {self._flight.plan.step} is in flight: commit or abandon it first")

    def _adopt(self, request: Request) -> None:
        self._requests[request.request_id] = request
        if request.family is not None:
            request.family.members.append(request)

    def finish(self, request_id: str) -> Request | None:
        """End a request in whatever state it is and give back all that it holds. None for an unknown id.

        While a plan that names it is in flight its blocks are kept until that plan is committed or abandoned.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        seq = self._roster.end(request)
        if seq is not None:
            if self._flight is not None and self._flight.holds(request):
                self._flight.deferred.append(seq)
            else:
                self.kv.release(seq)
        return request

    def schedule(self) -> StepPlan | None:
        """Decide the next step and reserve its KV (see Step); None when nothing can run.

        Raises:
            RuntimeError: the last plan is neither committed nor abandoned, or a request has nothing left to compute.
        """
        self._must_be_down()
        roster = self._roster
        step = Step(self.limits, roster, self.budget, self.preemption)
        step.decide()
        self.exhausted = step.exhausted
        if not (step.rows or roster.swap_out or roster.swap_in):
            self.stalled_steps += self.has_work
            return None
        self._step += 1
        added, removed = roster.states.changes(step.started)
        plan = StepPlan(
            step=self._step,
            requests=tuple([row.build() for row in step.rows]),
            added=added,
            removed=removed,
            copies=tuple([copy for row in step.rows if row.copies for copy in row.copies]),
            swap_out=tuple(roster.swap_out),
            swap_in=tuple(roster.swap_in),
        )
        planned = [row.request for row in step.rows]
        moved = len(roster.swap_out) + len(roster.swap_in)
        self._flight = Flight(plan, planned, step.decode_rows, step.chunk_rows, moved)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take a step's outcome over: the only place where state changes after a forward.

        Outputs of requests that ended since (an older epoch, an unknown id) are dropped. A planned request without
        an output is not advanced: its rows are computed again.

        Returns:
            The requests that advanced, in the plan's order.

        Raises:
            ValueError: this is not the plan in flight, or an output cannot come from it. Nothing is changed.
        """
        flight = self._flight
        if flight is None or plan is not flight.plan or result.step != plan.step:
            raise ValueError(f"plan {plan.step}, result {result.step}: not the step in flight")
        outputs = {output.request_id: output for output in result.outputs}
        for entry in plan.requests:
            check_output(entry, outputs.get(entry.request_id))
        advanced = []
        for entry, request in zip(plan.requests, flight.planned, strict=True):
            if request.epoch != entry.epoch:
                continue  # it ended since
            output = outputs.get(entry.request_id)
            if output is not None and output.epoch == entry.epoch:
                advance(request, entry, output, self.kv)
                advanced.append(request)
            request.draft = EMPTY_TREE
            self.kv.rollback(request.kv)
        self._roster.plan_ran()
        self._land(flight)
        self._last = flight
        return advanced

    def observe(self, seconds: float, swap_seconds: float = 0.0) -> None:
        """The last step took so long, drafting aside, of it so much for swaps: teaches budget and preemption."""
        last = self._last
        if last is not None:
            self.budget.observe(last.decode_rows, last.chunk_rows, seconds - swap_seconds)
            self.preemption.observe(last.num_moved, swap_seconds)

    def abandon(self, plan: StepPlan) -> None:
        """The step failed: take its reservations back. Its requests go on as if it had never been planned.

        Requests whose KV it moved to or from the host pool are computed again, as are forks of these. Whether the
        worker saw the plan is unknown, so later plans may remove states again, or ones never added.
        """
        flight = self._flight
        if flight is None or plan is not flight.plan:
            raise ValueError(f"plan {plan.step} is not in flight")
        self._roster.plan_failed()
        for request in self._roster.running:
            request.draft = EMPTY_TREE
            self.kv.rollback(request.kv)
        self._roster.states.abandoned(plan, self._roster.running)
        self._land(flight)

    def _land(self, flight: Flight) -> None:
        for seq in flight.deferred:
            self.kv.release(seq)
        self._flight = None

    def check(self) -> None:
        """Assert the invariants, incl. the pools against the tables; tests call it after every step."""
        roster = self._roster
        self.kv.check()
        roster.check(self.limits.places)
        live = [*roster.running, *roster.waiting]
        assert {r.request_id: r for r in live} == self._requests
        assert len(live) == len(self._requests)
