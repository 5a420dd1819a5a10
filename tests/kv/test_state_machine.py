"""Random histories of the KV manager against a naive model: token lists, and memory that is really written and copied.

A position's simulated KV stands for its namespace and every token up to it, so that reading a live table back shows
any wrong block, copy, overwrite or cache hit, on the target's and on the draft's pool.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from specserve.kv.prefix import PrefixChain
from tests.fakes.worker import kv_value

TOKEN = st.integers(0, 1)
SMALL = st.integers(0, 3)
WHICH = st.integers(0, 10**6)


class Model:
    """One sequence as it should be."""

    def __init__(self, kv, namespace, tokens):
        self.kv = kv
        self.namespace = namespace
        self.tokens = tokens
        self.committed = kv.target.committed
        self.draft_committed = kv.draft.committed
        self.step = None  # (known tokens, drafted tokens) that are reserved
        self.ran = False
        self.copies = []
        self.drafted = []  # by the draft model, KV of the first `written` of them is scratch in its cache
        self.written = 0
        self.draft_copies_lost = False


class KVMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.live = []
        self.digests = {}

    @initialize(
        size=st.sampled_from([2, 4, 1]), blocks=st.integers(2, 14), draft=st.integers(2, 10), cache=st.booleans()
    )
    def build(self, size, blocks, draft, cache):
        self.size = size
        self.cache = cache
        self.kv = KVManager(BlockPool(blocks, size), BlockPool(draft, size), prefix_cache=cache)
        self.memory = {"target": [None] * (blocks * size), "draft": [None] * (draft * size)}

    # Simulated memory

    def slot(self, table, position):
        return table.block_ids[position // self.size] * self.size + position % self.size

    def write(self, table, seq, tokens, start, end):
        for position in range(start, end):
            self.memory[table.name][self.slot(table, position)] = kv_value(seq.namespace, tokens, position)

    def copy(self, copies):
        for one in copies:
            memory, src, dst = self.memory[one.pool], one.src * self.size, one.dst * self.size
            memory[dst : dst + self.size] = memory[src : src + self.size]

    def pick(self, which, condition=lambda seq: True):
        found = [seq for seq in self.live if condition(seq)]
        return found[which % len(found)] if found else None

    # Rules

    @precondition(lambda self: len(self.live) < 6)
    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=12), namespace=st.sampled_from("ab"), known=st.integers(0, 12))
    def open(self, tokens, namespace, known):
        """A new prompt, of which a first chunk is computed at once."""
        seq = self.start(tokens, namespace)
        if known:
            self.reserve_rows(seq, known, [], False)
            self.forward()
            self.commit_rows(seq, 0, 1, False, True)

    @precondition(lambda self: 0 < len(self.live) < 6)
    @rule(which=WHICH, cut=SMALL, more=st.lists(TOKEN, max_size=3))
    def open_similar(self, which, cut, more):
        """Prefix lookup of what another has, less its end, with another end."""
        other = self.pick(which)
        tokens = [*other.tokens[: max(len(other.tokens) - cut, 0)], *more]
        if tokens:
            self.start(tokens, other.namespace)

    def start(self, tokens, namespace):
        seq = Model(self.kv.open(tokens, namespace), namespace, list(tokens))
        for table in (seq.kv.target, seq.kv.draft):
            assert table.committed <= len(tokens) - 1
            assert table.committed % self.size == 0
            assert self.cache or table.committed == 0
        self.live.append(seq)
        return seq

    @rule(which=WHICH, known=st.integers(1, 8), draft=st.lists(TOKEN, max_size=4), twice=st.booleans())
    def reserve(self, which, known, draft, twice):
        seq = self.pick(which, lambda s: s.step is None and s.committed < len(s.tokens))
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
                    self.forget(seq)
                return
            copies += got
        seq.step, seq.ran, seq.copies = (known, draft), False, copies

    @rule()
    def forward(self):
        """Everything that is reserved runs, copies first, as in one plan."""
        todo = [s for s in self.live if s.step is not None and not s.ran]
        for seq in todo:
            self.copy(seq.copies)
        for seq in todo:
            known, draft = seq.step
            tokens = [*seq.tokens[: seq.committed + known], *draft]
            self.write(seq.kv.target, seq, tokens, seq.committed, len(tokens))
            seq.copies, seq.ran = [], True

    @rule(which=WHICH, accepted=SMALL, token=TOKEN, cut=st.booleans(), rollback=st.booleans())
    def commit(self, which, accepted, token, cut, rollback):
        seq = self.pick(which, lambda s: s.ran)
        if seq is not None:
            self.commit_rows(seq, accepted, token, cut, rollback)

    @rule(
        known=st.integers(1, 8),
        drafts=st.lists(st.lists(TOKEN, max_size=4), max_size=6),
        accepted=SMALL,
        flip=TOKEN,
        between=st.sampled_from(["", "fork", "fork and rollback", "rollback", "release"]),
        which=WHICH,
    )
    def whole_step(self, known, drafts, accepted, flip, between, which):
        """One plan of all: every sequence reserves, all run, all commit. Equal ones go on with different tokens.

        Between reserving and running, one that waits for its copies may fork, or be dropped from the plan.
        """
        for i, seq in enumerate(self.live):
            if seq.step is None and seq.committed < len(seq.tokens):
                self.reserve_rows(seq, known, drafts[i] if i < len(drafts) else [], bool(flip))
        seq = self.pick(which, lambda s: s.copies) or self.pick(which)
        if seq is not None:
            if "fork" in between:
                self.fork_one(seq, flip)
            if "rollback" in between:
                self.rollback_one(seq)
            if "release" in between:
                self.release_one(seq)
        self.forward()
        for i, seq in enumerate(self.live):
            if seq.ran:
                self.commit_rows(seq, accepted, (i + flip) % 2, False, True)

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
            self.forget(seq)

    def forget(self, seq):
        seq.step, seq.ran, seq.copies, seq.drafted, seq.written = None, False, [], [], 0
        seq.draft_copies_lost = False

    @rule(which=WHICH)
    def rollback(self, which):
        seq = self.pick(which)
        if seq is not None:
            self.rollback_one(seq)

    def rollback_one(self, seq):
        self.kv.rollback(seq.kv)
        self.forget(seq)
        assert len(seq.kv.target.block_ids) == -(-seq.committed // self.size)
        assert len(seq.kv.draft.block_ids) == -(-seq.draft_committed // self.size)

    @precondition(lambda self: len(self.live) < 6)
    @rule(which=WHICH, token=st.sampled_from([0, 1, None]))
    def fork(self, which, token):
        seq = self.pick(which)
        if seq is not None:
            self.fork_one(seq, token)

    def fork_one(self, seq, token):
        """A child with the same tokens, or with another one after those that are committed."""
        if len(self.live) < 6:
            final = max(seq.committed, seq.draft_committed)
            tokens = seq.tokens if token is None else [*seq.tokens[:final], token]
            child = Model(self.kv.fork(seq.kv), seq.namespace, list(tokens))
            assert (child.committed, child.draft_committed) == (seq.committed, seq.draft_committed)
            self.live.append(child)

    @rule(which=WHICH)
    def release(self, which):
        seq = self.pick(which)
        if seq is not None:
            self.release_one(seq)

    def release_one(self, seq):
        self.kv.release(seq.kv)
        self.live.remove(seq)

    @rule(which=WHICH, known=st.integers(1, 8), draft=st.lists(TOKEN, max_size=4), lost=st.booleans())
    def draft(self, which, known, draft, lost):
        """The draft model catches up with known tokens and, when it has, drafts; or its copies never run."""
        seq = self.pick(which, lambda s: s.step is None and not s.draft_copies_lost)
        if seq is None:
            return
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
        self.copy(copies)
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

    # What must hold after every rule

    @invariant()
    def everything_reads_back(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        for pool, memory in ((self.kv.target, self.memory["target"]), (self.kv.draft, self.memory["draft"])):
            for block in range(pool.num_blocks):
                if pool.published(block):
                    self.is_what_its_digest_names(pool, memory, block)
        for seq in self.live:
            for table, committed in ((seq.kv.target, seq.committed), (seq.kv.draft, seq.draft_committed)):
                assert table.committed == committed
                self.reads_back(seq, table, committed)
            if seq.ran:
                self.reads_back(seq, seq.kv.target, seq.committed + seq.step[0])

    def is_what_its_digest_names(self, pool, memory, block):
        """A published block, used or free, holds one text's KV, and is found under that text's digest."""
        values = memory[block * self.size : (block + 1) * self.size]
        namespace, tokens = values[-1]
        start = len(tokens) - self.size
        assert values == [kv_value(namespace, tokens, start + i) for i in range(self.size)]
        if (namespace, tokens) not in self.digests:
            self.digests[namespace, tokens] = PrefixChain(namespace, self.size).digest(tokens, start // self.size)
        assert pool.lookup(self.digests[namespace, tokens]) == block

    def reads_back(self, seq, table, end):
        pending = table.pending_source
        for position in range(end):
            slot = self.slot(table, position)
            to_run = table.name == "draft" or not seq.ran
            if pending is not None and to_run and position // self.size == table.committed // self.size:
                slot = pending * self.size + position % self.size  # its copy has not run
            assert self.memory[table.name][slot] == kv_value(seq.namespace, seq.tokens, position)

    def teardown(self):
        for seq in self.live:
            self.kv.release(seq.kv)
        if hasattr(self, "kv"):
            self.kv.check()
            assert self.kv.baseline()


def test_2000_random_histories():
    run_state_machine_as_test(
        KVMachine,
        settings=settings(
            max_examples=2000,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
