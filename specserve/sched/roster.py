"""Roster: who runs and who waits, and the moves between the two."""

from __future__ import annotations

from bisect import insort

from specserve.core.request import Request, Status
from specserve.kv.manager import KVManager, SequenceKV
from specserve.kv.prefix import PrefixChain
from specserve.sched import preempt
from specserve.sched.policy import WaitingQueue, running_order
from specserve.sched.states import WorkerStates


class Roster:
    """Every live request, in one of two ordered lists.

    Attributes:
        running: requests that own KV, in running_order.
        waiting: requests that own none, in admission order.
        states: what the worker knows of them.
        num_preemptions: since the start.
    """

    __slots__ = ("_chains", "kv", "num_preemptions", "running", "states", "waiting")

    def __init__(self, kv: KVManager, waiting: WaitingQueue) -> None:
        self.kv = kv
        self.running: list[Request] = []
        self.waiting = waiting
        self.states = WorkerStates()
        self.num_preemptions = 0
        self._chains: dict[str, PrefixChain] = {}  # digests of waiting requests, so that a retry hashes nothing

    def open(self, request: Request) -> SequenceKV:
        """Look the waiting request's known tokens up in the prefix cache. The caller starts or releases it."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = PrefixChain(request.namespace, self.kv.block_size)
        return self.kv.open(request.token_ids, request.namespace, chain)

    def start(self, request: Request, seq: SequenceKV) -> None:
        """A waiting request runs, on KV from `open`. The queue drops it by itself while it admits."""
        del self._chains[request.request_id]
        if request.status is Status.WAITING:
            request.num_cached = seq.target.committed
        request.kv = seq
        request.num_computed = seq.target.committed
        request.move_to(Status.RUNNING)
        insort(self.running, request, key=running_order)

    def preempt(self, request: Request) -> None:
        """A running request gives its KV up and waits at the front of its priority."""
        self.running.remove(request)
        self._chains[request.request_id] = request.kv.chain
        preempt.give_up(request, self.kv)
        self.states.forget(request.request_id)
        self.waiting.push(request)
        self.num_preemptions += 1

    def end(self, request: Request) -> SequenceKV | None:
        """Take a request out, whatever it does. Returns its KV, which the caller releases."""
        seq: SequenceKV | None = request.kv
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.states.forget(request.request_id)
        else:
            self.waiting.remove(request)
            self._chains.pop(request.request_id, None)
        request.kv = None
        request.num_computed = 0
        request.move_to(Status.FINISHED)
        return seq

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        self.waiting.check()
        keys = [running_order(r) for r in self.running]
        assert keys == sorted(keys)
        for request in self.running:
            request.check()
            assert request.status is Status.RUNNING
            assert request.kv.target.committed == request.num_computed
            assert request.kv.draft is None or request.kv.draft.committed <= request.num_tokens
        for request in self.waiting:
            request.check()
            assert request.status in (Status.WAITING, Status.COMPILING, Status.PREEMPTED)
            assert request.num_computed == 0
        assert self._chains.keys() <= {r.request_id for r in self.waiting}
