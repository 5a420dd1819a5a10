"""Admission: who joins the running requests in one step, and on what KV each begins."""

from __future__ import annotations

from typing import Protocol

from specserve.core.request import Request, Status
from specserve.kv.manager import SequenceKV
from specserve.sched.family import origin, other_beams, private_blocks
from specserve.sched.limits import SchedulerLimits
from specserve.sched.policy import Verdict
from specserve.sched.roster import Roster
from specserve.sched.rows import Rows


class OpenStep(Protocol):
    """The step in the making."""

    spare: int
    allowance: int
    rows: list[Rows]
    started: list[Request]
    exhausted: list[Request]

    def extend_chunk(self, row: Rows) -> None: ...


class Admission:
    """Admits in policy order while a place, a row and blocks for all known tokens and one more are left.

    Blocks are promised, not taken: what those admitted before still need counts as gone, and one for each request
    with a row in this step as far as the pool is not tiny, so that what is admitted is not preempted at once. (A
    running request with known tokens left has the whole budget, so nothing is admitted beside it.)
    """

    __slots__ = ("_limits", "_promised", "_roster", "_step")

    def __init__(self, step: OpenStep, limits: SchedulerLimits, roster: Roster) -> None:
        self._step = step
        self._limits = limits
        self._roster = roster
        self._promised = min(len(step.rows), roster.kv.target.num_blocks // 16)

    def run(self) -> None:
        self._roster.waiting.admit(self._attempt)

    def _attempt(self, request: Request) -> Verdict:
        step, roster = self._step, self._roster
        if step.spare < 1 or step.allowance < 1 or roster.places >= self._limits.places:
            return Verdict.STOP
        if not roster.kv.can_ever_fit(request.num_tokens + 1):
            step.exhausted.append(request)
            return Verdict.UNABLE
        if roster.places + request.places > self._limits.places:
            return Verdict.BLOCKED
        return self._resume(request) if request.status is Status.SWAPPED else self._start(request)

    def _start(self, request: Request) -> Verdict:
        """On a fork of its family, or on what the prefix cache has."""
        roster = self._roster
        kv = roster.kv
        begin = origin(request)
        if begin is Verdict.HELD:
            self._promised += private_blocks(request, kv.block_size)
            return Verdict.HELD
        seq = kv.fork(begin[0].kv, begin[1]) if begin is not None else roster.open(request)
        if begin is None and self._is_coming(request, seq):
            kv.release(seq)
            self._promised += private_blocks(request, kv.block_size)
            return Verdict.HELD
        missing = kv.target.blocks_for(request.num_tokens + 1) - len(seq.target.block_ids)
        # A fork in the middle of a block copies it; a hit ends at a block's edge.
        missing += seq.target.committed % kv.block_size != 0
        others = sum(private_blocks(other, kv.block_size) for other in other_beams(request))
        if missing + others + self._promised > kv.target.num_free:
            kv.release(seq)
            return Verdict.BLOCKED
        roster.start(request, seq)
        self._join(request)
        return Verdict.ADMITTED

    def _is_coming(self, request: Request, seq: SequenceKV) -> bool:
        """A running request computes the very block that this one would compute first: its KV is soon in the cache."""
        kv = self._roster.kv
        index = len(seq.target.block_ids)
        end = (index + 1) * kv.block_size
        if not kv.prefix_cache or end >= request.num_tokens:
            return False
        digest = seq.chain.digest(request.token_ids, index)
        for row in self._step.rows:
            other = row.request
            if other.num_computed < end <= other.num_tokens and digest == other.kv.chain.digest(other.token_ids, index):
                return True
        return False

    def _join(self, request: Request) -> None:
        """A started request's rows of this step."""
        step = self._step
        kv = self._roster.kv
        step.started.append(request)
        copies = None if request.parked else kv.reserve(request.kv, 1)
        # Of beams that copy one block the last may find none: it sits this step out, after which the block is its own.
        assert copies is not None or request.params.beams, "there are free blocks"
        if copies is not None:
            row = Rows(request, copies)
            step.spare -= 1
            step.allowance -= 1
            step.extend_chunk(row)
            step.rows.append(row)
        self._promised += kv.target.blocks_for(request.num_tokens + 1) - len(request.kv.target.block_ids)

    def _resume(self, request: Request) -> Verdict:
        """Swapped KV comes back when all that the request, and the beams that went with it, need is there."""
        roster = self._roster
        kv = roster.kv
        beams = [request, *(r for r in other_beams(request) if r.status is Status.SWAPPED)]
        if self._step.spare < len(beams) or roster.places + sum(r.places for r in beams) > self._limits.places:
            return Verdict.BLOCKED
        grows = sum(kv.target.blocks_for(r.num_tokens + 1) - kv.target.blocks_for(r.num_computed) for r in beams)
        # Of those that share the block that they write next all but one copy it.
        written = [r.kv.target.slots[-1] for r in beams if r.num_computed % kv.block_size]
        copied = len(written) - len(set(written))
        if kv.swap_need([r.kv for r in beams]) + grows + copied + self._promised > kv.target.num_free:
            return Verdict.BLOCKED
        roster.resume(beams)
        for beam in beams[1:]:
            roster.waiting.remove(beam)
        for beam in beams:
            self._join(beam)
        return Verdict.ADMITTED
