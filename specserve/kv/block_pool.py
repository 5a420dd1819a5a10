"""BlockPool: fixed-size KV blocks with reference counts; the free list is the prefix cache's eviction order.

Blocks are numbers; the pool owns no memory. A free block may still hold published KV: it stays findable until it is
allocated again. The free list is intrusive (two link arrays), so every operation is O(1), or O(1) a block.
The paged layout is that of Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention", section 4.
"""

from __future__ import annotations


class BlockPool:
    """Allocates blocks 0 .. num_blocks - 1.

    The free list runs from the block that is given out next to the one that is kept longest. Blocks without published
    contents go to its front; published ones to its back, so that they are evicted in order of last use.

    Args:
        num_blocks: how many blocks there are (>= 1).
        block_size: tokens a block (>= 1).
    """

    __slots__ = ("_by_digest", "_digests", "_next", "_prev", "_refs", "block_size", "num_blocks", "num_free")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self._refs: list[int] = [0] * num_blocks
        # Circular and doubly linked; the entry at num_blocks is the sentinel between the back and the front.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_published(self) -> int:
        """Blocks whose contents a prefix lookup finds, used ones included."""
        return len(self._by_digest)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return (num_tokens + self.block_size - 1) // self.block_size

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self) -> int:
        """Take the least valuable free block, with one reference. What it held is forgotten.

        Raises:
            RuntimeError: no block is free; callers look at `num_free` first.
        """
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise RuntimeError("no free KV block")
        self._unlink(block)
        self.unpublish(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference; a free (cached) block comes back into use."""
        if self._refs[block] == 0:
            self._unlink(block)
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """Give one reference back; the last one frees the block.

        Raises:
            RuntimeError: nobody holds the block.
        """
        refs = self._refs[block] - 1
        if refs < 0:
            raise RuntimeError(f"KV block {block} is freed twice")
        self._refs[block] = refs
        if refs == 0:
            sentinel = self.num_blocks
            before = sentinel if self._digests[block] is None else self._prev[sentinel]
            self._link_after(before, block)

    def publish(self, block: int, digest: bytes) -> bool:
        """Make a full, used block findable under `digest`. The first block of a digest stays, later ones are private.

        Returns:
            Whether this block is the one found.
        """
        if self._refs[block] == 0:
            raise RuntimeError(f"KV block {block} is published while free")
        first = self._by_digest.get(digest)
        if first is not None:
            return first == block
        self.unpublish(block)
        self._by_digest[digest] = block
        self._digests[block] = digest
        return True

    def unpublish(self, block: int) -> None:
        """Forget a block's contents: it is going to be written. A no-op for a private block."""
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None

    def published(self, block: int) -> bool:
        return self._digests[block] is not None

    def lookup(self, digest: bytes) -> int | None:
        """The block published under `digest`. Takes no reference: `share` it before anything is allocated."""
        return self._by_digest.get(digest)

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after
        self.num_free += 1

    def free_order(self) -> list[int]:
        """Free blocks, the next one given out first. O(num_free), for tests and `check`."""
        order: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(order) <= self.num_blocks:
            order.append(block)
            block = self._next[block]
        return order

    def check(self) -> None:
        """Assert the invariants; tests call it after every operation."""
        order = self.free_order()
        assert len(order) == len(set(order)) == self.num_free, "the free list holds each free block once"
        free = set(order)
        for block, refs in enumerate(self._refs):
            assert refs >= 0
            assert (refs == 0) == (block in free), f"block {block} has {refs} references"
        links = [self.num_blocks, *order]
        for i, block in enumerate(links):
            assert self._prev[block] == links[i - 1], "the links agree both ways"
        for digest, block in self._by_digest.items():
            assert self._digests[block] == digest
        assert sum(d is not None for d in self._digests) == len(self._by_digest)
