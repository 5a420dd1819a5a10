"""BlockTable: which blocks hold one sequence's KV in one pool, and how much of it is committed.

Positions 0 .. committed are the sequence. What lies past `committed` is scratch: never hashed, never shared. Only the
block that holds position `committed` can be shared and written at once, so at most one copy is pending at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.plan import BlockCopy
from specserve.kv.block_pool import BlockPool
from specserve.kv.prefix import PrefixChain


class BlockTable:
    """The blocks of one sequence in one pool.

    Attributes:
        block_ids: block of positions i * block_size .. (i + 1) * block_size, in order.
        committed: tokens whose KV is final.
        num_hashed: full committed blocks that were offered to the prefix cache.
    """

    swapped = False  # of a SwappedTable alone
    __slots__ = ("_copied", "_pool", "block_ids", "committed", "name", "num_hashed")

    def __init__(self, pool: BlockPool, name: str = "target") -> None:
        self._pool = pool
        self.name = name
        self.block_ids: list[int] = []
        self.committed = 0
        self.num_hashed = 0
        # (index, source) of the copy that is not known to have run. The table's reference to the source is kept, so
        # that rollback can put it back.
        self._copied: tuple[int, int] | None = None

    @property
    def capacity(self) -> int:
        """Positions that the table's blocks hold, committed and scratch."""
        return len(self.block_ids) * self._pool.block_size

    @property
    def pending_source(self) -> int | None:
        """Source block of a copy that is still held, or None."""
        return self._copied[1] if self._copied is not None else None

    def attach(self, blocks: Sequence[int]) -> None:
        """Start an empty table on published full blocks (a prefix hit)."""
        for block in blocks:
            self._pool.share(block)
        self.block_ids.extend(blocks)
        self.num_hashed = len(blocks)
        self.committed = len(blocks) * self._pool.block_size

    def restore(self, blocks: Sequence[int], committed: int, num_hashed: int) -> None:
        """Start an empty table on blocks that hold its KV (a swap-in). Takes over one reference to each."""
        self.block_ids.extend(blocks)
        self.committed = committed
        self.num_hashed = num_hashed

    def _must_copy(self) -> bool:
        """The next position lies in a block that others read too."""
        index, offset = divmod(self.committed, self._pool.block_size)
        return offset != 0 and self._pool.refs(self.block_ids[index]) > 1

    def writable(self) -> int:
        """Positions after `committed` that `reserve` could give now."""
        pool = self._pool
        blocks = len(self.block_ids) + pool.num_free
        if self._must_copy():
            if pool.num_free == 0:
                return 0
            blocks -= 1
        return blocks * pool.block_size - self.committed

    def reserve(self, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Make `num_tokens` positions after `committed` writable.

        Returns:
            Copies to run before the write (both ends held until `commit` or `rollback`); None, and nothing is changed,
            when the pool has too few free blocks.
        """
        pool = self._pool
        ids = self.block_ids
        missing = pool.blocks_for(self.committed + num_tokens) - len(ids)
        copying = self._must_copy() if num_tokens > 0 else False
        if max(missing, 0) + copying > pool.num_free:
            return None
        copies: tuple[BlockCopy, ...] = ()
        index = self.committed // pool.block_size
        if copying:
            copies = (self._copy(index),)
        elif num_tokens > 0 and index < len(ids):
            # Ours alone, yet it may be published: a longer sequence that shared it filled it and is gone.
            pool.unpublish(ids[index])
        for _ in range(missing):
            ids.append(pool.allocate())
        return copies

    def _copy(self, index: int) -> BlockCopy:
        assert self._copied is None, "a fresh copy is never shared before it is settled"
        source = self.block_ids[index]
        fresh = self._pool.allocate()
        self.block_ids[index] = fresh
        self._copied = (index, source)
        return BlockCopy(source, fresh, self.name)

    def settle(self) -> None:
        """The pending copy has run: let its source go."""
        if self._copied is not None:
            self._pool.free(self._copied[1])
            self._copied = None

    def commit(self, num_tokens: int) -> None:
        """The next `num_tokens` reserved positions are written and final.

        Raises:
            ValueError: they were not reserved.
        """
        committed = self.committed + num_tokens
        if num_tokens < 0 or committed > len(self.block_ids) * self._pool.block_size:
            raise ValueError(f"{self.name}: {committed} tokens committed, {self.capacity} reserved")
        if self._copied is not None:
            self.settle()
        self.committed = committed

    def publish(self, chain: PrefixChain, token_ids: Sequence[int]) -> None:
        """Offer full blocks of committed tokens to the prefix cache, each once."""
        full = self.committed // self._pool.block_size
        for block in range(self.num_hashed, full):
            self._pool.publish(self.block_ids[block], chain.digest(token_ids, block))
        self.num_hashed = max(self.num_hashed, full)

    def rollback(self) -> None:
        """Drop the scratch: a copy that was not settled is undone, whole blocks past `committed` are freed."""
        if self._copied is not None:
            index, source = self._copied
            self._pool.free(self.block_ids[index])
            self.block_ids[index] = source
            self._copied = None
        self._trim(self._pool.blocks_for(self.committed))

    def _trim(self, keep: int) -> None:
        # Back to front, so that of a published chain the deepest block is evicted first.
        ids = self.block_ids
        while len(ids) > keep:
            self._pool.free(ids.pop())

    def final_blocks(self, num_tokens: int | None = None) -> list[int]:
        """The blocks of the first `num_tokens` tokens (None: of all committed), as if the pending copy never runs."""
        blocks = self.block_ids[: self._pool.blocks_for(self.committed if num_tokens is None else num_tokens)]
        if self._copied is not None and self._copied[0] < len(blocks):
            blocks[self._copied[0]] = self._copied[1]  # the source holds every committed token
        return blocks

    def fork(self, num_tokens: int | None = None) -> BlockTable:
        """A table that shares the blocks of the first `num_tokens` committed tokens (None: of all of them).

        Scratch is not inherited. The last block may hold more of this table's tokens: neither writes it while it is
        shared.

        Raises:
            ValueError: fewer tokens are committed.
        """
        if num_tokens is None:
            num_tokens = self.committed
        elif not 0 <= num_tokens <= self.committed:
            raise ValueError(f"{self.name}: a fork at {num_tokens} of {self.committed} committed tokens")
        child = BlockTable(self._pool, self.name)
        child.block_ids = self.final_blocks(num_tokens)
        for block in child.block_ids:
            self._pool.share(block)
        child.committed = num_tokens
        child.num_hashed = min(self.num_hashed, num_tokens // self._pool.block_size)
        return child

    def release(self) -> None:
        """Give everything back. Published blocks stay findable until they are reused."""
        self.settle()
        self._trim(0)
        self.committed = self.num_hashed = 0

    def check(self) -> None:
        """Assert the invariants; tests call it after every operation."""
        size = self._pool.block_size
        assert 0 <= self.committed <= self.capacity
        assert self.num_hashed <= self.committed // size, "nothing past committed is hashed"
        assert len(set(self.block_ids)) == len(self.block_ids)
        for index, block in enumerate(self.block_ids):
            refs = self._pool.refs(block)
            assert refs >= 1
            if index * size >= self.committed:
                assert refs == 1, "scratch is never shared"
                assert not self._pool.published(block), "scratch is never published"
        if self._copied is not None:
            index, source = self._copied
            assert index == self.committed // size
            assert self._pool.refs(source) >= 1
            assert self.block_ids[index] != source
