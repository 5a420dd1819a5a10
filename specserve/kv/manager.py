"""KVManager: the KV of every sequence in the target's and the draft's pool; one fork, commit or rollback moves both."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.plan import BlockCopy, BlockSwap
from specserve.kv.block_pool import BlockPool
from specserve.kv.host import HostPool
from specserve.kv.pair import PoolPair
from specserve.kv.prefix import PrefixChain
from specserve.kv.sequence import SequenceKV
from specserve.kv.swap import Swapper, named
from specserve.kv.table import BlockTable
from specserve.kv.usage import KVUsage, usage

__all__ = ["KVManager", "KVUsage", "SequenceKV"]


class KVManager:
    """Opens, grows, forks, swaps and releases sequences. Not thread-safe: one engine loop owns it.

    Args:
        target: the target model's pool.
        draft: the draft model's pool, of the same block size, or None.
        prefix_cache: whether committed full blocks are published and looked up.
        host, draft_host: host memory for swapped KV of each pool; None: none is swapped.
    """

    def __init__(
        self,
        target: BlockPool,
        draft: BlockPool | None = None,
        *,
        prefix_cache: bool = True,
        host: HostPool | None = None,
        draft_host: HostPool | None = None,
    ) -> None:
        if draft is not None and draft.block_size != target.block_size:
            raise ValueError(f"block sizes differ: target {target.block_size}, draft {draft.block_size}")
        self.target = target
        self.draft = draft
        self.host = host
        self.draft_host = draft_host if draft is not None else None
        self.block_size = target.block_size
        self.prefix_cache = prefix_cache
        self._live: set[SequenceKV] = set()
        self._swapper = Swapper(
            PoolPair(target, host, "target"),
            PoolPair(draft, draft_host, "draft") if draft is not None else None,
        )

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
        if self.prefix_cache:
            target.attach(_find(self.target, token_ids, chain))
            if draft is not None and self.draft is not None:
                draft.attach(_find(self.draft, token_ids, chain))
        seq = SequenceKV(target, draft, chain)
        self._live.add(seq)
        return seq

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
        if self.prefix_cache:
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
        if self.prefix_cache:
            target.publish(seq.chain, token_ids)
        if seq.written:
            draft = self._draft_table(seq)
            accepted = min(seq.written, target.committed - draft.committed)
            if accepted > 0:
                draft.commit(accepted)
                if self.prefix_cache:
                    draft.publish(seq.chain, token_ids)
            seq.written = 0

    def rollback(self, seq: SequenceKV) -> None:
        """Drop the scratch of both tables; copies that were not committed are undone."""
        seq.target.rollback()
        if seq.draft is not None:
            seq.draft.rollback()
        seq.written = 0

    def fork(self, seq: SequenceKV, num_tokens: int | None = None) -> SequenceKV:
        """A sequence that shares the KV of the first `num_tokens` committed tokens; None: all that is committed.

        The first write into a shared block copies it. The child may reserve at once, in the step in which the parent
        reserved: its copy runs before the forward, which leaves the parent's committed positions as they are.

        Raises:
            ValueError: fewer tokens are committed, or the sequence is swapped out.
        """
        target = seq.target.fork(num_tokens)
        draft = seq.draft
        if draft is not None:
            draft = draft.fork(None if num_tokens is None else min(num_tokens, draft.committed))
        known = max(target.num_hashed, draft.num_hashed if draft is not None else 0)
        child = SequenceKV(target, draft, seq.chain.fork(known))
        self._live.add(child)
        return child

    def swap_cost(self, seqs: Sequence[SequenceKV]) -> int:
        """Blocks of both pools that `swap_out` would move; one that several hold counts once."""
        return self._swapper.cost(seqs)

    def swap_need(self, seqs: Sequence[SequenceKV]) -> int:
        """Free blocks of the target's pool with which `swap_in` certainly succeeds; prefix hits may make it fewer."""
        return self._swapper.need(seqs)

    def recompute_rows(self, seq: SequenceKV) -> int:
        """Committed tokens to compute again after a release; those in leading blocks that others hold too are not."""
        return self._swapper.recompute_rows(seq)

    def swap_out(self, seqs: Sequence[SequenceKV]) -> tuple[BlockSwap, ...] | None:
        """Move sequences to host memory, all or none (see Swapper.out). Not while a plan that names one is being run.

        Returns:
            Moves for the plan; None: no room, nothing changed.
        """
        return self._swapper.out(named(seqs, self._live, swapped=False))

    def swap_in(self, seqs: Sequence[SequenceKV]) -> tuple[BlockSwap, ...] | None:
        """Bring swapped sequences back, all or none (see Swapper.back); they may reserve at once.

        Returns:
            Moves for the plan; None: too few free blocks, nothing changed.
        """
        return self._swapper.back(named(seqs, self._live, swapped=True))

    def swaps_ran(self, *, failed: bool = False) -> None:
        """The plan with the swaps since the last call is over: give back what it held, publish what it brought in.

        Args:
            failed: whether it ran is unknown: nothing is published. What it swapped, and forks of that, is `lost`.
        """
        self._swapper.settle(failed)

    def unsettled(self, seq: SequenceKV) -> bool:
        """Whether KV of the sequence, its own or shared by a fork, comes with a swap-in that `swaps_ran` has to end."""
        return self._swapper.unsettled(seq)

    def lost(self, seq: SequenceKV) -> None:
        """Release what a failed plan swapped in or out; its KV is never published. Call `swaps_ran` after it."""
        self.release(seq)

    def release(self, seq: SequenceKV) -> None:
        """Give both tables back, in device or host memory. Not while a plan that names the sequence is being run.

        Raises:
            ValueError: it was released before.
        """
        if seq not in self._live:
            raise ValueError("the sequence was released before")
        self._live.remove(seq)
        self._swapper.forget(seq)
        seq.target.release()
        if seq.draft is not None:
            seq.draft.release()
        seq.written = 0

    @property
    def num_sequences(self) -> int:
        return len(self._live)

    def usage(self) -> KVUsage:
        return usage(self.target, self.draft, self.host, self.draft_host)

    def baseline(self) -> bool:
        """No sequence is open and every block of all pools is free (cached contents may remain)."""
        pools = (self.target, self.draft, self.host, self.draft_host)
        return not self._live and all(pool is None or pool.num_used == 0 for pool in pools)

    def check(self) -> None:
        """Assert the invariants, and that the pools' counts are exactly what the live tables hold."""
        for seq in self._live:
            seq.check()
        self._swapper.check(self._live)


def _find(pool: BlockPool, token_ids: Sequence[int], chain: PrefixChain) -> list[int]:
    """Published blocks of the leading full blocks of `token_ids`, but for its last token."""
    found: list[int] = []
    for index in range((len(token_ids) - 1) // pool.block_size):
        block = pool.lookup(chain.digest(token_ids, index))
        if block is None:
            break
        found.append(block)
    return found
