"""Step: the decision of one step. Who gets how many rows, whose KV gives way; who is admitted is Admission's."""

from __future__ import annotations

from specserve.core.request import Request, Status
from specserve.core.tree import EMPTY_TREE
from specserve.sched.admission import Admission
from specserve.sched.budget import TokenBudget
from specserve.sched.limits import SchedulerLimits
from specserve.sched.preempt import Preemption, victim
from specserve.sched.roster import Roster
from specserve.sched.rows import Rows, draft_limit


class Step:
    """One step in the making. Reserves KV as it decides.

    First every running request gets one row, the earliest ones at the cost of the latest. What is left of rows and
    free blocks goes to drafts (half of it while others need rows too), then, within the token budget, to chunks of
    known tokens and to new requests: none of these preempts anybody.

    Attributes:
        rows: what is computed, in order.
        started: requests that the step gave KV to.
        exhausted: requests that fill the whole pool and can never take another token.
        num_decoding: requests whose last known token alone is computed.
        decode_rows: of these and their drafts.
    """

    __slots__ = (
        "_budget",
        "_limits",
        "_preempted",
        "_preemption",
        "_prefills",
        "_roster",
        "allowance",
        "decode_rows",
        "exhausted",
        "num_decoding",
        "rows",
        "spare",
        "started",
    )

    def __init__(self, limits: SchedulerLimits, roster: Roster, budget: TokenBudget, preemption: Preemption) -> None:
        self._limits = limits
        self._roster = roster
        self._budget = budget
        self._preemption = preemption
        self._preempted = False
        self._prefills: list[Rows] = []
        # Rows beyond the one that each running request gets, and how many of them chunks of known tokens may take.
        self.spare = limits.max_batched_tokens - len(roster.running)
        self.allowance = 0
        self.num_decoding = 0
        self.decode_rows = 0
        self.rows: list[Rows] = []
        self.started: list[Request] = []
        self.exhausted: list[Request] = []

    @property
    def chunk_rows(self) -> int:
        """Rows of known tokens beside those of `num_decoding`."""
        return sum(row.known for row in self.rows) - self.num_decoding

    def decide(self) -> None:
        self._secure_running()
        self._extend_drafts()
        self.decode_rows = self.num_decoding + sum([row.drafted for row in self.rows])
        num_waiting = len(self._prefills) + len(self._roster.waiting)
        self.allowance = self._budget.rows(self.decode_rows, num_waiting / max(self.num_decoding, 1))
        self._extend_chunks(self._prefills)
        waiting = self._roster.waiting
        if not self._preempted and len(waiting):
            Admission(self, self._limits, self._roster).run()
        if not self.rows and not self.exhausted and self._roster.running and waiting.has_ready:
            self._break_stall()

    def _secure_running(self) -> None:
        """One row for each running request, in order; where no block is free the latest requests give way."""
        roster = self._roster
        reserve = roster.kv.reserve
        for request in tuple(roster.running):
            if request.status is not Status.RUNNING:
                continue  # it gave way to an earlier one
            if request.num_computed >= len(request.token_ids):
                if request.parked:
                    self.spare += 1
                    continue
                raise RuntimeError(f"request {request.request_id} has nothing to compute: it should have been finished")
            copies = reserve(request.kv, 1)
            while copies is None:
                latest = victim(roster.running, request)
                if latest is None:
                    break
                self._preempt(latest)
                copies = reserve(request.kv, 1)
            if copies is None:
                self._idle(request)
            else:
                self.rows.append(Rows(request, copies))

    def _preempt(self, request: Request) -> None:
        self.spare += self._roster.preempt(request, self._preemption, self._budget.seconds_per_row)
        self._preempted = True
        if self.started:
            self.started = [started for started in self.started if started.status is Status.RUNNING]

    def _break_stall(self) -> None:
        """Nobody has a row: beams wait for others of theirs that find no room. The latest give way to the first."""
        roster = self._roster
        head = next(r for r in roster.waiting if r.status is not Status.COMPILING)
        while not self.rows and roster.running:
            last = roster.running[-1]
            if last.family is not None and last.family is head.family:
                return
            self._preempt(last)
            Admission(self, self._limits, roster).run()

    def _idle(self, request: Request) -> None:
        """The latest request finds no block: it keeps what it has and sits this step out, without its draft."""
        self.spare += 1
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
        self.num_decoding = len(self.rows) - len(self._prefills)
        if not drafting:
            return
        admitting = not self._preempted and self._roster.waiting.has_ready
        kept = (self.spare + 1) // 2 if self._prefills or admitting else 0
        self.spare -= kept
        for row in drafting:
            row.drafted = self._grow(row, draft_limit(row.request, self._limits.max_model_len))
        self.spare += kept

    def _extend_chunks(self, prefills: list[Rows]) -> None:
        self.allowance -= len(prefills)
        for row in prefills:
            self.extend_chunk(row)

    def extend_chunk(self, row: Rows) -> None:
        """As many more known tokens as the token budget, spare rows and free blocks allow."""
        request = row.request
        more = self._grow(row, min(len(request.token_ids) - request.num_computed - 1, self.allowance))
        row.known += more
        self.allowance -= more

    def _grow(self, row: Rows, num_tokens: int) -> int:
        """Reserve up to `num_tokens` positions beyond the one that is secured. Returns how many it became."""
        if num_tokens <= 0 or self.spare <= 0:
            return 0
        kv = self._roster.kv
        seq = row.request.kv
        more = min(num_tokens, self.spare, kv.writable(seq) - 1)
        if more <= 0:
            return 0
        copies = kv.reserve(seq, 1 + more)
        assert copies == (), "the block at the first position was made writable with the first row"
        self.spare -= more
        return more
