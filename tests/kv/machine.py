"""Random steps of the KV manager beside a naive model: sequences of tokens that are opened, computed, forked, released.

A position's simulated KV stands for its namespace and every token up to it, so that reading a live table back shows
any wrong block, copy, overwrite or cache hit, on the target's and on the draft's pool. Swaps and failed plans are in
test_state_machine.py; the plan that is being made is run or fails as a whole, as the scheduler's does.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from specserve.kv.swap import HostPool
from tests.kv.memory import Memory, text_kv

TOKEN = st.integers(0, 1)
SMALL = st.integers(0, 3)
WHICH = st.integers(0, 10**6)
PLACES = 6


class Model:
    """One sequence as it should be."""

    def __init__(self, kv, namespace, tokens):
        self.kv = kv
        self.namespace = namespace
        self.tokens = tokens
        self.committed = kv.target.committed
        self.draft_committed = kv.draft.committed
        self.swapped = False
        self.forget()

    def forget(self):
        self.step = None  # (known tokens, drafted tokens) that are reserved
        self.ran = False
        self.copies = []
        self.drafted = []  # by the draft model, KV of the first `written` of them is scratch in its cache
        self.written = 0
        self.draft_copies_lost = False

    @property
    def can_step(self):
        return self.step is None and not self.swapped and self.committed < len(self.tokens)


class Steps(RuleBasedStateMachine):
    """Rules without swaps."""

    def __init__(self):
        super().__init__()
        self.live = []
        self.outs, self.ins, self.moved = [], [], []  # moves of the plan that is being made, and of which sequences

    @initialize(
        size=st.sampled_from([2, 4, 1]),
        blocks=st.integers(2, 14),
        draft=st.integers(2, 10),
        host=st.sampled_from([8, 16, 12, 6, 4, 2, 0, None]),
        draft_host=st.sampled_from([8, 12, 4, 2, 0, None]),
        cache=st.sampled_from([True, True, False]),
        prompts=st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=1, max_size=3),
    )
    def build(self, size, blocks, draft, host, draft_host, cache, prompts):
        self.size = size
        self.cache = cache
        self.kv = KVManager(
            BlockPool(blocks, size),
            BlockPool(draft, size),
            prefix_cache=cache,
            host=HostPool(host) if host is not None else None,
            draft_host=HostPool(draft_host) if draft_host is not None else None,
        )
        self.memory = Memory(size, {"target": blocks, "draft": draft}, {"target": host or 0, "draft": draft_host or 0})

        for tokens in prompts:
            self.open(tokens, "a", len(tokens))
            self.draft(-1, len(tokens), [], False)

    def pick(self, which, condition=lambda seq: True):
        found = [seq for seq in self.live if condition(seq)]
        return found[which % len(found)] if found else None

    # Opening and releasing

    @precondition(lambda self: len(self.live) < PLACES)
    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=12), namespace=st.sampled_from("ab"), known=st.integers(0, 12))
    def open(self, tokens, namespace, known):
        """A new prompt, of which a first chunk is computed at once."""
        seq = self.start(tokens, namespace)
        if known:
            self.reserve_rows(seq, known, [], False)
            self.forward()
            self.commit_rows(seq, 0, 1, False, True)

    @precondition(lambda self: 0 < len(self.live) < PLACES)
    @rule(which=WHICH, cut=SMALL, more=st.lists(TOKEN, max_size=3))
    def open_similar(self, which, cut, more):
        """Prefix lookup of what another has, less its end, with another end."""
        other = self.pick(which)
        tokens = [*other.tokens[: max(len(other.tokens) - cut, 0)], *more]
        if tokens:
            self.start(tokens, other.namespace)

    def start(self, tokens, namespace, chain=None):
        seq = Model(self.kv.open(tokens, namespace, chain), namespace, list(tokens))
        for table in (seq.kv.target, seq.kv.draft):
            assert table.committed <= len(tokens) - 1
            assert table.committed % self.size == 0
            assert self.cache or table.committed == 0
        self.live.append(seq)
        return seq

    @precondition(lambda self: self.live)
    @rule(which=WHICH, again=st.booleans())
    def release(self, which, again):
        """In whatever state it is; and perhaps opened again, to be recomputed."""
        seq = self.pick(which)
        if seq is not None:
            self.release_one(seq)
            if again:
                self.start(seq.tokens, seq.namespace, seq.kv.chain)

    def release_one(self, seq):
        self.kv.release(seq.kv)
        self.live.remove(seq)

    @rule()
    def evict(self):
        """All free blocks are taken and given back: nothing is cached but what is in use."""
        for pool in (self.kv.target, self.kv.draft):
            for block in [pool.allocate() for _ in range(pool.num_free)]:
                pool.free(block)

    # Steps

    @precondition(lambda self: any(s.can_step for s in self.live))
    @rule(which=WHICH, known=st.integers(1, 8), draft=st.lists(TOKEN, max_size=4), twice=st.booleans())
    def reserve(self, which, known, draft, twice):
        seq = self.pick(which, lambda s: s.can_step)
        if seq is not None:
            self.reserve_rows(seq, known, draft, twice)

    def reserve_rows(self, seq, known, draft, twice):
        left = len(seq.tokens) - seq.committed
        known = min(known, left)
        draft = [] if known < left else seq.drafted[: len(draft)] if seq.drafted else draft
        rows = known + len(draft)
        room = self.kv.writable(seq.kv)
        copies = []
        for want in (1, rows) if twice else (rows,):
            got = self.kv.reserve(seq.kv, want)
            assert (got is None) == (want > room)
            if got is None:
                if copies:
                    self.kv.rollback(seq.kv)
                    seq.forget()
                return
            copies += got
        seq.step, seq.ran, seq.copies = (known, draft), False, copies

    @property
    def planned(self):
        return [seq for seq in self.live if seq.step is not None and not seq.ran]

    @precondition(lambda self: self.outs or self.ins or self.planned)
    @rule()
    def forward(self, settle=True):
        """The plan runs: out, in, copies, then the rows of everything that is reserved."""
        self.memory.swap(self.outs, self.ins)
        todo = self.planned
        for seq in todo:
            self.memory.copy(seq.copies)
        for seq in todo:
            known, draft = seq.step
            tokens = [*seq.tokens[: seq.committed + known], *draft]
            self.write(seq.kv.target, seq, tokens, seq.committed, len(tokens))
            seq.copies, seq.ran = [], True
        self.outs, self.ins, self.moved = [], [], []
        if settle:
            self.kv.swaps_ran()

    def write(self, table, seq, tokens, start, end):
        for position, value in enumerate(text_kv(seq.namespace, tokens, start, end), start):
            self.memory.write(table, position, value)

    @precondition(lambda self: any(s.ran for s in self.live))
    @rule(which=WHICH, accepted=SMALL, token=TOKEN, cut=st.booleans(), rollback=st.booleans())
    def commit(self, which, accepted, token, cut, rollback):
        seq = self.pick(which, lambda s: s.ran)
        if seq is not None:
            self.commit_rows(seq, accepted, token, cut, rollback)

    def commit_rows(self, seq, accepted, token, cut, rollback):
        if not seq.ran:
            return
        known, draft = seq.step
        accepted = min(accepted, len(draft))
        if seq.committed + known == len(seq.tokens):
            seq.tokens += draft[:accepted] if cut and accepted else [*draft[:accepted], token]
        self.kv.commit(seq.kv, seq.tokens, known + accepted)
        seq.committed += known + accepted
        written = min(seq.draft_committed + seq.written, seq.committed)
        seq.draft_committed = max(seq.draft_committed, written)
        seq.step, seq.ran, seq.drafted, seq.written = None, False, [], 0
        if rollback:
            self.kv.rollback(seq.kv)
            seq.forget()

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def rollback(self, which):
        seq = self.pick(which)
        if seq is not None:
            self.rollback_one(seq)

    def rollback_one(self, seq):
        self.kv.rollback(seq.kv)
        seq.forget()
        if not seq.swapped:
            assert len(seq.kv.target.block_ids) == -(-seq.committed // self.size)
            assert len(seq.kv.draft.block_ids) == -(-seq.draft_committed // self.size)

    # Forks

    @precondition(lambda self: len(self.live) < PLACES)
    @rule(which=WHICH, token=st.sampled_from([0, 1, None]), at=st.none() | st.integers(0, 12), more=st.booleans())
    def fork(self, which, token, at, more):
        seq = self.pick(which, lambda s: not s.swapped)
        if seq is not None:
            self.fork_one(seq, token, at, more)

    def fork_one(self, seq, token, at, more):
        """A child of all or the first `at` tokens, with the same tokens or another one after them; it may go on at
        once, in the step in which its parent goes on."""
        if len(self.live) == PLACES or seq.swapped:
            return
        at = None if at is None else min(at, seq.committed)
        committed, draft = seq.committed, seq.draft_committed
        if at is not None:
            committed, draft = at, min(at, draft)
        tokens = seq.tokens if token is None else [*seq.tokens[: max(committed, draft)], token]
        child = Model(self.kv.fork(seq.kv, at), seq.namespace, list(tokens))
        assert (child.committed, child.draft_committed) == (committed, draft)
        self.live.append(child)
        if more and child.can_step:
            self.reserve_rows(child, 2, [], False)

    # The draft model

    @precondition(lambda self: self.live)
    @rule(which=WHICH, known=st.integers(1, 8), draft=st.lists(TOKEN, max_size=4), lost=st.booleans())
    def draft(self, which, known, draft, lost):
        """The draft model catches up with known tokens and, when it has, drafts; or its copies never run."""
        seq = self.pick(which, lambda s: s.step is None and not s.swapped and not s.draft_copies_lost)
        if seq is None:
            return
        if self.outs or self.ins:
            self.forward()  # the draft model runs between plans
        known = min(known, len(seq.tokens) - seq.draft_committed)
        complete = known > 0 and seq.draft_committed + known == len(seq.tokens)
        draft = draft if complete else []
        rows = known + max(len(draft) - 1, 0)
        room = self.kv.writable_draft(seq.kv)
        copies = self.kv.reserve_draft(seq.kv, rows)
        assert (copies is None) == (rows > room)
        if copies is None:
            return
        seq.drafted, seq.written = [], 0
        if lost and copies:
            seq.draft_copies_lost = True
            return
        self.memory.copy(copies)
        table = seq.kv.draft
        start = seq.draft_committed
        self.write(table, seq, seq.tokens, start, start + known)
        self.kv.commit_draft(seq.kv, seq.tokens, known)
        seq.draft_committed += known
        seq.drafted = draft
        for i in range(len(draft) - 1):
            tokens = [*seq.tokens, *draft]
            self.write(table, seq, tokens, len(seq.tokens) + i, len(seq.tokens) + i + 1)
            self.kv.write_draft(seq.kv, 1)
            seq.written += 1
