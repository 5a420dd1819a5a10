"""PoolPair: moves blocks between a device pool and a host pool, for one plan at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from specserve.core.plan import BlockSwap
from specserve.kv.block_pool import BlockPool
from specserve.kv.host import HostPool, SwappedTable
from specserve.kv.table import BlockTable


class PoolPair:
    """A device pool and its host pool, and what the plan in the making holds of both.

    Attributes:
        filling: device blocks that a swap-in of the plan has yet to fill.
    """

    __slots__ = ("_kept_blocks", "_kept_slots", "filling", "host", "name", "pool")

    def __init__(self, pool: BlockPool, host: HostPool | None, name: str) -> None:
        self.pool = pool
        self.host = host
        self.name = name
        self.filling: set[int] = set()
        self._kept_slots: list[int] = []
        self._kept_blocks: list[int] = []

    def blocks(self, tables: Iterable[BlockTable]) -> list[int]:
        """Distinct device blocks that hold committed tokens."""
        return list(dict.fromkeys(block for table in tables for block in table.final_blocks()))

    def takes(self, blocks: Collection[int]) -> bool:
        """Whether the host pool has room for the blocks, and all of them hold their KV when the plan begins."""
        host = self.host
        if host is None or host.num_blocks == 0 or len(blocks) > host.num_free:
            return False
        return self.filling.isdisjoint(blocks)

    def take(self, tables: Iterable[BlockTable], blocks: Iterable[int]) -> tuple[list[SwappedTable], list[BlockSwap]]:
        """Swap out: one slot for each of the `blocks` that the tables hold. Gives back all that the tables have."""
        host = self.host
        assert host is not None
        slots = {block: host.allocate() for block in blocks}
        self._kept_slots.extend(slots.values())
        swapped = []
        for table in tables:
            table.rollback()
            mine = tuple([slots[block] for block in table.block_ids])
            for slot in mine:
                host.share(slot)
            swapped.append(SwappedTable(self.pool, self.name, host, mine, table.committed, table.num_hashed))
            table.release()
        return swapped, [BlockSwap(block, slot, self.name) for block, slot in slots.items()]

    def drop(self, tables: Iterable[BlockTable]) -> list[SwappedTable]:
        """Give back all that the tables have; nothing of it is kept."""
        swapped = []
        for table in tables:
            self.keep(table)
            table.rollback()
            table.release()
            swapped.append(SwappedTable(self.pool, self.name))
        return swapped

    def find(self, tables: Iterable[SwappedTable], digests: Iterable[Sequence[bytes]]) -> dict[int, int]:
        """Device blocks by slot, for the slots whose text the prefix cache has now. Takes no reference."""
        found = {}
        for table, names in zip(tables, digests, strict=True):
            for index in range(table.num_hashed):
                block = self.pool.lookup(names[index])
                if block is not None:
                    found[table.slots[index]] = block
        return found

    def fits(self, slots: Collection[int], found: dict[int, int]) -> bool:
        """Whether the free blocks are enough for the slots; what was found among them counts as taken."""
        refs = self.pool.refs
        revived = sum(refs(block) == 0 for block in set(found.values()))
        return len(slots) - len(found) + revived <= self.pool.num_free

    def bring(
        self, tables: Iterable[SwappedTable], slots: Iterable[int], found: dict[int, int]
    ) -> tuple[list[BlockTable], list[BlockSwap]]:
        """Swap in: a found block for a slot, else a new one, which all tables with that slot share."""
        pool = self.pool
        blocks = dict(found)
        for block in found.values():
            pool.share(block)  # before anything is allocated, which might take it
        swaps = []
        for slot in slots:
            if slot not in found:
                blocks[slot] = pool.allocate()
                swaps.append(BlockSwap(blocks[slot], slot, self.name))
        self.filling.update(swap.device for swap in swaps)
        back = []
        for swapped in tables:
            table = BlockTable(pool, self.name)
            mine = [blocks[slot] for slot in swapped.slots]
            for block in mine:
                pool.share(block)
            table.restore(mine, swapped.committed, swapped.num_hashed)
            back.append(table)
            self._kept_slots.extend(swapped.slots)
        for block in blocks.values():
            pool.free(block)  # the tables hold it now
        return back, swaps

    def leave(self, tables: Iterable[SwappedTable]) -> list[BlockTable]:
        """Empty tables; what was kept for them is given up."""
        back = []
        for table in tables:
            self._kept_slots.extend(table.slots)
            back.append(BlockTable(self.pool, self.name))
        return back

    def keep(self, table: BlockTable) -> None:
        """The table goes before the plan ran: until then nobody may have the blocks that the plan fills."""
        if self.filling:
            kept = self.filling.intersection(table.final_blocks())
            for block in kept:
                self.pool.share(block)
            self._kept_blocks.extend(kept)

    def settle(self) -> None:
        """The plan is over."""
        for block in self._kept_blocks:
            self.pool.free(block)
        if self.host is not None:
            for slot in self._kept_slots:
                self.host.free(slot)
        self._kept_blocks.clear()
        self._kept_slots.clear()
        self.filling.clear()

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Assert that both pools' counts are exactly what the live tables and the plan hold."""
        self.pool.check()
        held = Counter(block for table in tables for block in table.block_ids)
        held.update(source for table in tables if (source := table.pending_source) is not None)
        held.update(self._kept_blocks)
        for block in range(self.pool.num_blocks):
            assert self.pool.refs(block) == held[block], (
                f"block {block}: {self.pool.refs(block)} counted, {held[block]} held"
            )
        for block in self.filling:
            assert not self.pool.published(block), f"block {block} is published before it is filled"
        slots = Counter(slot for table in tables if isinstance(table, SwappedTable) for slot in table.slots)
        slots.update(self._kept_slots)
        if self.host is None:
            assert not slots
            return
        self.host.check()
        for slot in range(self.host.num_blocks):
            assert self.host.refs(slot) == slots[slot], (
                f"slot {slot}: {self.host.refs(slot)} counted, {slots[slot]} held"
            )
