"""Host memory for swapped KV: slots with reference counts, and tables that hold slots instead of device blocks."""

from __future__ import annotations

from typing import NoReturn

from specserve.core.plan import BlockCopy
from specserve.kv.block_pool import BlockPool
from specserve.kv.table import BlockTable


class HostPool:
    """Allocates host slots 0 .. num_blocks - 1, each as large as one device block. Numbers only; every call is O(1).

    Args:
        num_blocks: how many slots there are; with 0 nothing is ever swapped.
    """

    __slots__ = ("_free", "_refs", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"a host pool of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._refs: list[int] = [0] * num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def refs(self, slot: int) -> int:
        return self._refs[slot]

    def allocate(self) -> int:
        """Take a free slot, with one reference.

        Raises:
            RuntimeError: no slot is free; callers look at `num_free` first.
        """
        if not self._free:
            raise RuntimeError("no free host slot")
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """One more reference to a used slot.

        Raises:
            RuntimeError: the slot is free, so what it holds is nobody's.
        """
        if self._refs[slot] == 0:
            raise RuntimeError(f"host slot {slot} is shared while free")
        self._refs[slot] += 1

    def free(self, slot: int) -> None:
        """Give one reference back; the last one frees the slot.

        Raises:
            RuntimeError: nobody holds the slot.
        """
        if self._refs[slot] == 0:
            raise RuntimeError(f"host slot {slot} is freed twice")
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            self._free.append(slot)

    def check(self) -> None:
        """Assert the invariants; tests call it after every operation."""
        free = set(self._free)
        assert len(free) == len(self._free), "the free list holds each free slot once"
        for slot, refs in enumerate(self._refs):
            assert refs >= 0
            assert (refs == 0) == (slot in free), f"host slot {slot} has {refs} references"


class SwappedTable(BlockTable):
    """Stands for a BlockTable while its KV is in host memory. Has no device block and takes no device operation.

    Args:
        pool, name: of the table it stands for.
        host: the pool of `slots`, one reference to each of which is taken over. None: nothing was kept.
        slots: host slot of positions i * block_size .. (i + 1) * block_size, in order; empty where nothing was kept.
        committed, num_hashed: of the table it stands for; 0 where nothing was kept.
    """

    swapped = True
    __slots__ = ("_host", "slots")

    def __init__(
        self,
        pool: BlockPool,
        name: str,
        host: HostPool | None = None,
        slots: tuple[int, ...] = (),
        committed: int = 0,
        num_hashed: int = 0,
    ) -> None:
        super().__init__(pool, name)
        self._host = host
        self.slots = slots
        self.committed = committed
        self.num_hashed = num_hashed

    def _refuse(self) -> NoReturn:
        raise ValueError(f"{self.name}: the sequence is swapped out; swap it in first")

    def writable(self) -> int:
        return 0

    def reserve(self, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        self._refuse()

    def commit(self, num_tokens: int) -> None:
        self._refuse()

    def fork(self, num_tokens: int | None = None) -> BlockTable:
        self._refuse()

    def rollback(self) -> None:
        """There is no scratch."""

    def release(self) -> None:
        """Give the slots back."""
        if self._host is not None:
            for slot in self.slots:
                self._host.free(slot)
        self.slots = ()
        self.committed = self.num_hashed = 0

    def check(self) -> None:
        """Assert the invariants; tests call it after every operation."""
        assert not self.block_ids
        assert self.pending_source is None
        assert len(self.slots) == len(set(self.slots)) == self._pool.blocks_for(self.committed)
        assert self.num_hashed <= self.committed // self._pool.block_size
