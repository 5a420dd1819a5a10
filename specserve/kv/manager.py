"""KVManager: the KV of every sequence in the target's and the draft's pool; one fork, commit or rollback moves both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.core.plan import BlockCopy
from specserve.kv.block_pool import BlockPool
from specserve.kv.prefix import PrefixChain
from specserve.kv.table import BlockTable


class SequenceKV:
    """The KV of one sequence.

    Attributes:
        target, draft: block tables; draft is None without a draft model.
        chain: prefix digests, common to both tables.
        written: drafted tokens past `draft.committed` that were written in the draft's cache as scratch.
    """

    __slots__ = ("chain", "draft", "target", "written")

    def __init__(self, target: BlockTable, draft: BlockTable | None, chain: PrefixChain) -> None:
        self.target = target
        self.draft = draft
        self.chain = chain
        self.written = 0


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Blocks in use; free blocks with cached contents are not."""

    blocks: int
    blocks_used: int
    draft_blocks: int
    draft_blocks_used: int


class KVManager:
    """Opens, grows, forks and releases sequences. Not thread-safe: one engine loop owns it.

    Args:
        target: the target model's pool.
        draft: the draft model's pool, of the same block size, or None.
        prefix_cache: whether committed full blocks are published and looked up.
    """

    def __init__(self, target: BlockPool, draft: BlockPool | None = None, *, prefix_cache: bool = True) -> None:
        if draft is not None and draft.block_size != target.block_size:
            raise ValueError(f"block sizes differ: target {target.block_size}, draft {draft.block_size}")
        self.target = target
        self.draft = draft
        self.block_size = target.block_size
        self._prefix_cache = prefix_cache
        self._live: set[SequenceKV] = set()

    @property
    def max_positions(self) -> int:
        """Positions of the target's whole pool: what one sequence alone can have."""
        return self.target.num_blocks * self.block_size

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits the target's pool when it is alone."""
        return num_tokens <= self.max_positions

    def open(self, token_ids: Sequence[int], namespace: str, chain: PrefixChain | None = None) -> SequenceKV:
        """A new sequence on what the prefix cache has of `token_ids`: found, shared and counted in one call.

        At most len(token_ids) - 1 tokens are hits, in whole blocks: the last token is always computed. Takes no free
        block that the cache does not already hold for it.

        Args:
            chain: digests kept from an earlier try with the same tokens and namespace, so that none is hashed twice.
        """
        if chain is None:
            chain = PrefixChain(namespace, self.block_size)
        target = BlockTable(self.target, "target")
        draft = BlockTable(self.draft, "draft") if self.draft is not None else None
        if self._prefix_cache:
            target.attach(self._find(self.target, token_ids, chain))
            if draft is not None and self.draft is not None:
                draft.attach(self._find(self.draft, token_ids, chain))
        seq = SequenceKV(target, draft, chain)
        self._live.add(seq)
        return seq

    def _find(self, pool: BlockPool, token_ids: Sequence[int], chain: PrefixChain) -> list[int]:
        found: list[int] = []
        for index in range((len(token_ids) - 1) // self.block_size):
            block = pool.lookup(chain.digest(token_ids, index))
            if block is None:
                break
            found.append(block)
        return found

    def writable(self, seq: SequenceKV) -> int:
        """Positions after `target.committed` that `reserve` could give now."""
        return seq.target.writable()

    def writable_draft(self, seq: SequenceKV) -> int:
        """Positions after `draft.committed` that `reserve_draft` could give now; 0 without a draft table."""
        return seq.draft.writable() if seq.draft is not None else 0

    def reserve(self, seq: SequenceKV, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Make `num_tokens` positions after `target.committed` writable.

        Returns:
            Copies to run before the forward; both ends are held until `commit` or `rollback`. A later reserve of the
            same step returns only further ones. None: impossible now, nothing changed.
        """
        return seq.target.reserve(num_tokens)

    def reserve_draft(self, seq: SequenceKV, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """The same on the draft's table, counted from `draft.committed`; None also without a draft table.

        Copies are held until `commit_draft`, `write_draft` or `rollback`. Begins a new draft: earlier scratch is
        forgotten.
        """
        if seq.draft is None:
            return None
        copies = seq.draft.reserve(num_tokens)
        if copies is not None:
            seq.written = 0
        return copies

    def commit_draft(self, seq: SequenceKV, token_ids: Sequence[int], num_tokens: int) -> None:
        """KV of `num_tokens` more KNOWN tokens is in the draft's cache (catch-up), and its reserved copies ran.

        `token_ids` is the request's whole known token list. May run ahead of the target. Earlier scratch is forgotten.
        """
        table = self._draft_table(seq)
        if table.committed + num_tokens > len(token_ids):
            raise ValueError(f"draft: {table.committed + num_tokens} tokens committed, {len(token_ids)} known")
        table.commit(num_tokens)
        seq.written = 0
        if self._prefix_cache:
            table.publish(seq.chain, token_ids)

    def write_draft(self, seq: SequenceKV, num_tokens: int) -> None:
        """`num_tokens` more DRAFTED tokens are in the draft's cache, as scratch past its committed and written ones.

        Call it with draft.committed at the last known token. The drafted tokens must be those that the target
        verifies next; `rollback` when they are not.
        """
        table = self._draft_table(seq)
        written = seq.written + num_tokens
        if table.committed + written > table.capacity:
            raise ValueError(f"draft: {table.committed + written} tokens written, {table.capacity} reserved")
        table.settle()
        seq.written = written

    def _draft_table(self, seq: SequenceKV) -> BlockTable:
        if seq.draft is None:
            raise ValueError("the sequence has no draft table")
        return seq.draft

    def commit(self, seq: SequenceKV, token_ids: Sequence[int], num_tokens: int) -> None:
        """The step's `num_tokens` positions after `target.committed` are final, and its reserved copies ran.

        Accepted tokens that the draft model wrote become committed there too. Full blocks of committed tokens are
        published; nothing past `committed` ever is.

        Args:
            token_ids: the request's whole known token list, this step's tokens appended.
        """
        target = seq.target
        if target.committed + num_tokens > len(token_ids):
            raise ValueError(f"target: {target.committed + num_tokens} tokens committed, {len(token_ids)} known")
        target.commit(num_tokens)
        if self._prefix_cache:
            target.publish(seq.chain, token_ids)
        if seq.written:
            draft = self._draft_table(seq)
            accepted = min(seq.written, target.committed - draft.committed)
            if accepted > 0:
                draft.commit(accepted)
                if self._prefix_cache:
                    draft.publish(seq.chain, token_ids)
            seq.written = 0

    def rollback(self, seq: SequenceKV) -> None:
        """Drop the scratch of both tables; copies that were not committed are undone."""
        seq.target.rollback()
        if seq.draft is not None:
            seq.draft.rollback()
        seq.written = 0

    def fork(self, seq: SequenceKV) -> SequenceKV:
        """A sequence that shares every committed block of both tables; the first write into a shared one copies it."""
        target = seq.target.fork()
        draft = seq.draft.fork() if seq.draft is not None else None
        known = max(target.num_hashed, draft.num_hashed if draft is not None else 0)
        child = SequenceKV(target, draft, seq.chain.fork(known))
        self._live.add(child)
        return child

    def release(self, seq: SequenceKV) -> None:
        """Give both tables back. Not while a plan that names the sequence is being run.

        Raises:
            ValueError: it was released before.
        """
        if seq not in self._live:
            raise ValueError("the sequence was released before")
        self._live.remove(seq)
        seq.target.release()
        if seq.draft is not None:
            seq.draft.release()
        seq.written = 0

    @property
    def num_sequences(self) -> int:
        return len(self._live)

    def usage(self) -> KVUsage:
        draft = self.draft
        return KVUsage(
            blocks=self.target.num_blocks,
            blocks_used=self.target.num_used,
            draft_blocks=draft.num_blocks if draft is not None else 0,
            draft_blocks_used=draft.num_used if draft is not None else 0,
        )

    def baseline(self) -> bool:
        """No sequence is open and every block of both pools is free (cached contents may remain)."""
        return not self._live and self.target.num_used == 0 and (self.draft is None or self.draft.num_used == 0)

    def check(self) -> None:
        """Assert the invariants, and that the pools' counts are exactly what the live tables hold."""
        for seq in self._live:
            seq.target.check()
            if seq.draft is not None:
                seq.draft.check()
                assert seq.draft.committed + seq.written <= seq.draft.capacity
        _check_counts(self.target, [seq.target for seq in self._live])
        if self.draft is not None:
            _check_counts(self.draft, [seq.draft for seq in self._live if seq.draft is not None])


def _check_counts(pool: BlockPool, tables: Sequence[BlockTable]) -> None:
    pool.check()
    held = Counter(block for table in tables for block in table.block_ids)
    held.update(source for table in tables if (source := table.pending_source) is not None)
    for block in range(pool.num_blocks):
        assert pool.refs(block) == held[block], f"block {block}: {pool.refs(block)} counted, {held[block]} held"
