"""Roster: who runs and who waits, and the moves between the two."""

from __future__ import annotations

from bisect import insort

from specserve.core.plan import BlockSwap
from specserve.core.request import Request, Status
from specserve.kv.manager import KVManager, SequenceKV
from specserve.kv.prefix import PrefixChain
from specserve.sched import preempt
from specserve.sched.policy import WaitingQueue, running_order
from specserve.sched.states import WorkerStates


class Roster:
    """Every live request, in one of two ordered lists.

    Attributes:
        running: requests that own KV blocks, in running_order.
        waiting: requests that own none (swapped ones own host slots), in admission order.
        places: of the running ones together; too many only where beams keep those of others that ended waiting.
        states: what the worker knows of them.
        swapped_out, swapped_in: requests whose KV the plan that is being made moves, and the moves.
        num_preemptions, num_swapped: requests that gave way since the start, and how many of them to the host pool.
    """

    __slots__ = (
        "_chains",
        "kv",
        "num_preemptions",
        "num_swapped",
        "places",
        "running",
        "states",
        "swap_in",
        "swap_out",
        "swapped_in",
        "swapped_out",
        "waiting",
    )

    def __init__(self, kv: KVManager, waiting: WaitingQueue) -> None:
        self.kv = kv
        self.running: list[Request] = []
        self.waiting = waiting
        self.places = 0
        self.states = WorkerStates()
        self.num_preemptions = 0
        self.num_swapped = 0
        self.swapped_out: list[Request] = []
        self.swapped_in: list[Request] = []
        self.swap_out: list[BlockSwap] = []
        self.swap_in: list[BlockSwap] = []
        self._chains: dict[str, PrefixChain] = {}  # digests of waiting requests, so that a retry hashes nothing

    def open(self, request: Request) -> SequenceKV:
        """Look the waiting request's known tokens up in the prefix cache. The caller starts or releases it."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = PrefixChain(request.namespace, self.kv.block_size)
        return self.kv.open(request.token_ids, request.namespace, chain)

    def start(self, request: Request, seq: SequenceKV) -> None:
        """A waiting request runs, on KV from `open` or from a fork. The queue drops it by itself while it admits."""
        self._chains.pop(request.request_id, None)
        if request.status is Status.WAITING:
            request.num_cached = seq.target.committed
        request.kv = seq
        request.num_computed = seq.target.committed
        self._run(request)

    def resume(self, requests: list[Request]) -> None:
        """Swapped requests run again: their KV comes back with the plan. The caller saw that there is room."""
        swaps = self.kv.swap_in([request.kv for request in requests])
        assert swaps is not None, "the caller looked at the free blocks"
        self.swap_in.extend(swaps)
        self.swapped_in.extend(requests)
        for request in requests:
            self._run(request)

    def fork(self, parent: Request, child: Request, places: int) -> None:
        """A new request goes on from all that is computed of `parent`: at once if that runs, else from the queue.

        It takes a place that one of its family keeps; without one it runs only if fewer than `places` are taken.
        """
        members = child.family.members if child.family is not None else []
        keeper = min((m for m in members if m.places > 1), key=lambda m: m.status is not Status.RUNNING, default=None)
        if keeper is not None:
            keeper.places -= 1
            self.places -= keeper.status is Status.RUNNING
        if parent.status is not Status.RUNNING or self.places >= places:
            self.waiting.push(child)
            return
        child.kv = self.kv.fork(parent.kv)
        child.num_computed = parent.num_computed
        self._run(child)
        self.states.again(child)

    def _run(self, request: Request) -> None:
        request.move_to(Status.RUNNING)
        insort(self.running, request, key=running_order)
        self.places += request.places

    def preempt(self, request: Request, policy: preempt.Preemption, seconds_per_row: float | None) -> int:
        """A running request gives its KV up, its beams with it, and waits at the front of its priority.

        Returns:
            How many requests stopped running.
        """
        leaving = preempt.together(request)
        seqs = [leaver.kv for leaver in leaving]
        swaps = self.kv.swap_out(seqs) if policy.swaps(self.kv, seqs, seconds_per_row) else None
        for leaver in leaving:
            self.running.remove(leaver)
            self.places -= leaver.places
            self.states.forget(leaver.request_id)
            if swaps is None:
                self._chains[leaver.request_id] = leaver.kv.chain
                self._drop(leaver, lost=False)
            else:
                leaver.move_to(Status.SWAPPED)
            self.waiting.push(leaver)
        if swaps is not None:
            self.swap_out.extend(swaps)
            self.swapped_out.extend(leaving)
            self.num_swapped += len(leaving)
        self.num_preemptions += len(leaving)
        return len(leaving)

    def _drop(self, request: Request, *, lost: bool) -> None:
        """Give a request's KV up for recomputation. Its pending draft is dropped, its epoch bumped."""
        if lost:
            self.kv.lost(request.kv)
        else:
            self.kv.release(request.kv)
        request.kv = None
        request.num_computed = 0
        request.move_to(Status.PREEMPTED)

    def plan_ran(self, *, failed: bool = False) -> None:
        """The plan's moves ran, unless it `failed`."""
        if self.swapped_out or self.swapped_in:
            self.swapped_out, self.swapped_in, self.swap_out, self.swap_in = [], [], [], []
            self.kv.swaps_ran(failed=failed)

    def plan_failed(self) -> None:
        """Whether the plan's moves ran is unknown: what they moved is recomputed, and what was forked from that."""
        for request in self.swapped_out:
            if request.status is Status.SWAPPED:
                self.waiting.remove(request)
                self._drop(request, lost=True)
                self.waiting.push(request)
        for request in [r for r in self.running if self.swapped_in and self.kv.unsettled(r.kv)]:
            self.running.remove(request)
            self.places -= request.places
            self.states.forget(request.request_id)
            self._drop(request, lost=True)
            self.waiting.push(request)
        self.plan_ran(failed=True)

    def end(self, request: Request) -> SequenceKV | None:
        """Take a request out, whatever it does. Returns its KV, which the caller releases."""
        seq: SequenceKV | None = request.kv
        self._leave_family(request)
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.places -= request.places
            self.states.forget(request.request_id)
        else:
            self.waiting.remove(request)
            self._chains.pop(request.request_id, None)
        request.kv = None
        request.num_computed = 0
        request.move_to(Status.FINISHED)
        return seq

    def _leave_family(self, request: Request) -> None:
        """A beam that ends leaves its place to the others: the search may grow again."""
        family = request.family
        if family is None:
            return
        family.members.remove(request)
        if family.in_step and family.members:
            heir = min(family.members, key=lambda member: member.status is not request.status)
            heir.places += request.places
            if heir.status is Status.RUNNING:
                self.places += request.places

    def check(self, places: int) -> None:
        """Assert the invariants; tests call it after every step."""
        self.waiting.check()
        self.states.check(self.running)
        assert len(self.running) <= places
        assert self.kv.num_sequences >= sum(r.kv is not None for r in (*self.running, *self.waiting))
        keys = [running_order(r) for r in self.running]
        assert keys == sorted(set(keys))
        assert self.places == sum(r.places for r in self.running)
        for request in self.running:
            request.check()
            assert request.status is Status.RUNNING
            assert request.kv.target.committed == request.num_computed
            assert request.kv.draft is None or request.kv.draft.committed <= request.num_tokens
        for request in self.waiting:
            request.check()
            assert (request.kv is not None) == (request.status is Status.SWAPPED)
            assert request.status is not Status.RUNNING
            assert request.num_computed == 0 or request.status is Status.SWAPPED
        assert self._chains.keys() <= {r.request_id for r in self.waiting}
