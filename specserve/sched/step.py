"""Step: the decision of one step. Who gets how many rows, whose KV gives way, who is admitted."""

from __future__ import annotations

from specserve.core.request import Request, Status
from specserve.core.tree import EMPTY_TREE
from specserve.sched import preempt
from specserve.sched.limits import SchedulerLimits
from specserve.sched.policy import Verdict
from specserve.sched.roster import Roster
from specserve.sched.rows import Rows, draft_limit


class Step:
    """One step in the making. Reserves KV as it decides.

    First every running request gets one row, the earliest ones at the cost of the latest. What is left of rows and
    free blocks goes to drafts (half of it while others need rows too), then to chunks of known tokens, then to new
    requests: none of these preempts anybody.

    Attributes:
        rows: what is computed, in order.
        started: requests that the step gave KV to.
        exhausted: requests that fill the whole pool and can never take another token.
    """

    __slots__ = ("_limits", "_preempted", "_prefills", "_promised", "_roster", "_spare", "exhausted", "rows", "started")

    def __init__(self, limits: SchedulerLimits, roster: Roster) -> None:
        self._limits = limits
        self._roster = roster
        # Rows beyond the one that each running request gets.
        self._spare = limits.max_batched_tokens - len(roster.running)
        self._preempted = False
        self._promised = 0
        self._prefills: list[Rows] = []
        self.rows: list[Rows] = []
        self.started: list[Request] = []
        self.exhausted: list[Request] = []

    def decide(self) -> None:
        self._secure_running()
        self._extend_drafts()
        self._extend_chunks(self._prefills)
        if not self._preempted and len(self._roster.waiting):
            self._admit()

    def _secure_running(self) -> None:
        """One row for each running request, in order; where no block is free the latest requests give way."""
        roster = self._roster
        reserve = roster.kv.reserve
        for request in tuple(roster.running):
            if request.status is not Status.RUNNING:
                continue  # it gave way to an earlier one
            if request.num_computed >= len(request.token_ids):
                raise RuntimeError(f"request {request.request_id} has nothing to compute: it should have been finished")
            copies = reserve(request.kv, 1)
            while copies is None:
                latest = preempt.victim(roster.running, request)
                if latest is None:
                    break
                roster.preempt(latest)
                self._preempted = True
                self._spare += 1
                copies = reserve(request.kv, 1)
            if copies is None:
                self._idle(request)
            else:
                self.rows.append(Rows(request, copies))

    def _idle(self, request: Request) -> None:
        """The latest request finds no block: it keeps what it has and sits this step out, without its draft."""
        self._spare += 1
        request.draft = EMPTY_TREE
        kv = self._roster.kv
        kv.rollback(request.kv)
        if not kv.can_ever_fit(request.num_computed + 1):
            self.exhausted.append(request)

    def _extend_drafts(self) -> None:
        """Drafts as far as spare rows and free blocks go.

        Where others have known tokens left to compute, running or waiting, drafts leave them half of the spare rows:
        otherwise many drafts would keep new requests out for as long as the running ones last.
        """
        drafting: list[Rows] = []
        for row in self.rows:
            request = row.request
            if len(request.token_ids) - request.num_computed > 1:
                self._prefills.append(row)
            elif request.draft:
                drafting.append(row)
        if not drafting:
            return
        admitting = not self._preempted and self._roster.waiting.has_ready
        kept = (self._spare + 1) // 2 if self._prefills or admitting else 0
        self._spare -= kept
        for row in drafting:
            row.drafted = self._grow(row, draft_limit(row.request, self._limits.max_model_len))
        self._spare += kept

    def _extend_chunks(self, prefills: list[Rows]) -> None:
        for row in prefills:
            request = row.request
            row.known += self._grow(row, len(request.token_ids) - request.num_computed - 1)

    def _grow(self, row: Rows, num_tokens: int) -> int:
        """Reserve up to `num_tokens` positions beyond the one that is secured. Returns how many it became."""
        if num_tokens <= 0 or self._spare <= 0:
            return 0
        kv = self._roster.kv
        seq = row.request.kv
        more = min(num_tokens, self._spare, kv.writable(seq) - 1)
        if more <= 0:
            return 0
        copies = kv.reserve(seq, 1 + more)
        assert copies == (), "the block at the first position was made writable with the first row"
        self._spare -= more
        return more

    def _admit(self) -> None:
        """Admit in policy order while a place, a row and blocks for all known tokens and one more are left.

        Blocks are promised, not taken: what those admitted before still need counts as gone, and one for each running
        request's growth as far as the pool is not tiny, so that what is admitted is not preempted at once. (A running
        request with known tokens left has all spare rows, so nothing is admitted beside it.)
        """
        roster = self._roster
        pool = roster.kv.target
        self._promised = min(len(roster.running), pool.num_blocks // 16)
        roster.waiting.admit(self._attempt)

    def _attempt(self, request: Request) -> Verdict:
        roster = self._roster
        kv = roster.kv
        if self._spare < 1 or len(roster.running) >= self._limits.places:
            return Verdict.STOP
        if not kv.can_ever_fit(request.num_tokens + 1):
            self.exhausted.append(request)
            return Verdict.UNABLE
        seq = roster.open(request)
        missing = kv.target.blocks_for(request.num_tokens + 1) - len(seq.target.block_ids)
        if missing + self._promised > kv.target.num_free:
            kv.release(seq)
            return Verdict.BLOCKED
        roster.start(request, seq)
        copies = kv.reserve(seq, 1)
        assert copies == (), "a hit ends at a block's edge, and there are free blocks"
        self._spare -= 1
        row = Rows(request, copies)
        self._extend_chunks([row])
        self._promised += kv.target.blocks_for(request.num_tokens + 1) - len(seq.target.block_ids)
        self.rows.append(row)
        self.started.append(request)
        return Verdict.ADMITTED
