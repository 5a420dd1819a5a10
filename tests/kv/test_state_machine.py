"""Random histories of the KV manager with swaps and failed plans, and what must hold after each of their steps."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from specserve.kv.prefix import PrefixChain
from tests.fakes.worker import kv_value
from tests.kv.machine import SMALL, TOKEN, WHICH, Steps
from tests.kv.memory import GARBAGE, held, text_kv

MASK = st.integers(1, 63)
MOVES = ("", "out", "in", "out, in", "evict, in", "evict, in, out", "evict, in, drop, in")


class KVMachine(Steps):
    def __init__(self):
        super().__init__()
        self.digests = {}

    def some(self, mask, swapped):
        """Sequences by the bits of a mask."""
        return [seq for i, seq in enumerate(self.live) if mask >> i & 1 and seq.swapped is swapped]

    def pools(self):
        """All that a refused swap may not change."""
        state = [[(list(t.block_ids), t.committed) for s in self.live for t in (s.kv.target, s.kv.draft)]]
        for pool in (self.kv.target, self.kv.draft):
            state += [[pool.refs(block) for block in range(pool.num_blocks)], pool.free_order()]
            state.append([pool.published(block) for block in range(pool.num_blocks)])
        for host in (self.kv.host, self.kv.draft_host):
            state.append(host and [host.refs(slot) for slot in range(host.num_blocks)])
        return state

    # Swaps

    @precondition(lambda self: any(not s.swapped for s in self.live))
    @rule(mask=MASK)
    def swap_out(self, mask):
        self.swap_out_some(self.some(mask, False))

    def swap_out_some(self, seqs):
        if not seqs:
            return
        before = self.pools()
        target = held([seq.kv.target for seq in seqs], self.size)
        draft = held([seq.kv.draft for seq in seqs], self.size)
        along = self.has_room("target", self.kv.host, target)
        draft_along = self.has_room("draft", self.kv.draft_host, draft)
        cost = self.kv.swap_cost([seq.kv for seq in seqs])
        assert cost == len(target) + (len(draft) if draft_along else 0)
        rows = [self.kv.recompute_rows(seq.kv) for seq in seqs]
        assert all(0 <= r <= seq.committed for r, seq in zip(rows, seqs, strict=True))
        swaps = self.kv.swap_out([seq.kv for seq in seqs])
        assert (swaps is not None) == along
        if swaps is None:
            assert self.pools() == before
            return
        assert {swap.device for swap in swaps if swap.pool == "target"} == target
        assert {swap.device for swap in swaps if swap.pool == "draft"} == (draft if draft_along else set())
        assert len(swaps) == cost
        self.outs += swaps
        ends = [(swap.pool, swap.host) for swap in self.outs]
        assert len(ends) == len(set(ends)), "no slot is written twice by one plan"
        for seq in seqs:
            seq.forget()
            seq.swapped = True
            if not draft_along:
                seq.draft_committed = 0
        self.moved += seqs

    def has_room(self, pool, host, blocks):
        """Whether host memory has it; what comes with the plan cannot go with it."""
        coming = {swap.device for swap in self.ins if swap.pool == pool}
        return bool(host and host.num_blocks) and len(blocks) <= host.num_free and not blocks & coming

    @precondition(lambda self: any(s.swapped for s in self.live))
    @rule(mask=MASK)
    def swap_in(self, mask):
        self.swap_in_some(self.some(mask, True))

    def swap_in_some(self, seqs):
        if not seqs:
            return
        before = self.pools()
        need = self.kv.swap_need([seq.kv for seq in seqs])
        assert need == len({slot for seq in seqs for slot in seq.kv.target.slots})
        draft_need = len({slot for seq in seqs for slot in seq.kv.draft.slots})
        free, draft_free = self.kv.target.num_free, self.kv.draft.num_free
        swaps = self.kv.swap_in([seq.kv for seq in seqs])
        if swaps is None:
            assert need > free
            assert self.pools() == before
            return
        assert free - self.kv.target.num_free <= need
        assert len({block for seq in seqs for block in seq.kv.target.block_ids}) <= need
        self.ins += swaps
        ends = [(swap.pool, swap.device) for swap in self.ins]
        assert len(ends) == len(set(ends)), "no block is filled twice by one plan"
        drafts = [seq.kv.draft.committed for seq in seqs]
        if drafts != [seq.draft_committed for seq in seqs]:
            assert draft_need > draft_free
            assert not any(drafts), "all of the drafts or none"
        for seq, draft in zip(seqs, drafts, strict=True):
            seq.swapped, seq.draft_committed = False, draft
        self.moved += seqs

    @precondition(lambda self: any(s.swapped for s in self.live))
    @rule(which=WHICH)
    def use_swapped(self, which):
        """Nothing can be done with it but what the other rules do."""
        seq = self.pick(which, lambda s: s.swapped)
        if seq is None:
            return
        before = self.pools()
        for refused in (
            lambda: self.kv.reserve(seq.kv, 1),
            lambda: self.kv.commit(seq.kv, [*seq.tokens, 0], 0),
            lambda: self.kv.reserve_draft(seq.kv, 1),
            lambda: self.kv.fork(seq.kv, 0),
            lambda: self.kv.swap_out([seq.kv]),
        ):
            with pytest.raises(ValueError):
                refused()
        self.kv.rollback(seq.kv)
        assert (self.kv.writable(seq.kv), self.pools()) == (0, before)

    # Whole plans

    @precondition(lambda self: self.live)
    @rule(
        known=st.integers(1, 8),
        drafts=st.lists(st.lists(TOKEN, max_size=4), max_size=6),
        accepted=SMALL,
        flip=TOKEN,
        moves=st.sampled_from(MOVES),
        between=st.sampled_from(["", "fork", "fork and rollback", "rollback", "release"]),
        which=WHICH,
        mask=MASK,
        at=st.none() | st.integers(0, 12),
        fails=st.sampled_from([False, False, True]),
    )
    def whole_step(self, known, drafts, accepted, flip, moves, between, which, mask, at, fails):
        """One plan of all: every sequence reserves, all run, all commit. Equal ones go on with different tokens.

        Between reserving and running some are swapped, and one that came back or waits for its copies may fork, or be
        dropped from the plan.
        """
        if "in" in moves and not any(seq.swapped for seq in self.live):
            self.swap_out_some(self.some(mask, False))
            self.forward()
            for i in range(len(self.live)):  # the others' drafts take the room
                self.draft(i, 8 * flip, [], False)
        for i, seq in enumerate(self.live):
            if seq.can_step:
                self.reserve_rows(seq, known, drafts[i] if i < len(drafts) else [], bool(flip))
        for move in moves.split(", "):
            self.swap_or_evict(move, mask, known)
        self.disturb(between, which, flip, at)
        if fails:
            self.fail(bool(flip))
            return
        self.forward(settle=False)
        for i, seq in enumerate(self.live):
            self.commit_rows(seq, accepted, (i + flip) % 2, False, True)
        self.kv.swaps_ran()

    def swap_or_evict(self, move, mask, known):
        if move == "out":
            self.swap_out_some(self.some(mask, False))
        elif move == "evict":
            self.evict()
        elif move == "drop":
            for seq in [seq for seq in self.moved if seq in self.live][:1]:
                self.release_one(seq)
        elif move == "in":
            back = [seq for seq in self.live if seq.swapped][: mask % 4 + 1]
            self.swap_in_some(back)
            for seq in back:
                if seq.can_step:
                    self.reserve_rows(seq, known, [], False)

    def disturb(self, between, which, flip, at):
        """Fork one that came back with this plan, else one that waits for its copies, or drop it from the plan."""
        came = [seq for seq in self.moved if seq in self.live and not seq.swapped]
        seq = came[which % len(came)] if came else self.pick(which, lambda s: s.copies) or self.pick(which)
        if seq is None:
            return
        if "fork" in between:
            self.fork_one(seq, flip, at, True)
        if "rollback" in between:
            self.rollback_one(seq)
        if "release" in between:
            self.release_one(seq)

    @precondition(lambda self: self.outs or self.ins)
    @rule(told_first=st.booleans())
    def fail(self, told_first):
        """The plan failed, and all that it may have written is garbage. What it swapped is recomputed."""
        self.memory.fail(self.outs, self.ins, [copy for seq in self.planned for copy in seq.copies])
        lost = [seq for seq in self.live if seq in self.moved or self.kv.unsettled(seq.kv)]
        for seq in self.planned:
            known, draft = seq.step
            for position in range(seq.committed, seq.committed + known + len(draft)):
                self.memory.write(seq.kv.target, position, GARBAGE)
            if seq not in lost:
                self.rollback_one(seq)
        if told_first:
            self.kv.swaps_ran(failed=True)
        for seq in lost:
            self.kv.lost(seq.kv)
            self.live.remove(seq)
        if not told_first:
            self.kv.swaps_ran()
        self.outs, self.ins, self.moved = [], [], []
        for seq in lost:
            self.start(seq.tokens, seq.namespace, seq.kv.chain)

    # What must hold after every rule

    @invariant()
    def everything_reads_back(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        for name, pool in (("target", self.kv.target), ("draft", self.kv.draft)):
            for block in range(pool.num_blocks):
                if pool.published(block):
                    self.is_what_its_digest_names(pool, self.memory.block(name, block), block)
        memory = self.memory
        if self.outs or self.ins:  # as it will be when the plan runs
            memory = memory.clone()
            memory.swap(self.outs, self.ins)
        for seq in self.live:
            assert seq.kv.swapped is seq.swapped
            for table, committed in ((seq.kv.target, seq.committed), (seq.kv.draft, seq.draft_committed)):
                assert table.committed == committed
                self.reads_back(memory, seq, table, committed, False)
            if seq.ran:
                self.reads_back(memory, seq, seq.kv.target, seq.committed + seq.step[0], True)

    def is_what_its_digest_names(self, pool, values, block):
        """A published block, used or free, holds one text's KV, and is found under that text's digest."""
        namespace, tokens = values[-1] or GARBAGE
        start = len(tokens) - self.size
        assert start >= 0, "nothing was written where it is said to be"
        assert values == text_kv(namespace, tokens, start, len(tokens))
        if (namespace, tokens) not in self.digests:
            self.digests[namespace, tokens] = PrefixChain(namespace, self.size).digest(tokens, start // self.size)
        assert pool.lookup(self.digests[namespace, tokens]) == block

    def reads_back(self, memory, seq, table, end, copied):
        for position in range(end):
            assert memory.read(table, position, copied) == kv_value(seq.namespace, seq.tokens, position)

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        for seq in self.live:
            self.kv.release(seq.kv)
        self.kv.swaps_ran()
        self.kv.check()
        assert self.kv.baseline()


def test_random_histories(examples):
    run_state_machine_as_test(
        KVMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
