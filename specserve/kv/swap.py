"""Swapper: moves the KV of sequences to host memory and back (Kwon et al. 2023, section 4.5).

The moves are data for the plan, which runs swap_out, then swap_in, then copies, before its forward. Until the plan ran,
it holds every host slot that it writes or reads, so that no slot and no block is the end of two of its moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from specserve.core.plan import BlockSwap
from specserve.kv.host import HostPool, SwappedTable
from specserve.kv.pair import PoolPair
from specserve.kv.sequence import SequenceKV
from specserve.kv.table import BlockTable

__all__ = ["HostPool", "Swapper"]


class Swapper:
    """Swaps sequences, their target tables always and their draft tables where there is room.

    Args:
        target, draft: the pools; draft is None without a draft model.
    """

    __slots__ = ("_draft", "_filled", "_target")

    def __init__(self, target: PoolPair, draft: PoolPair | None) -> None:
        self._target = target
        self._draft = draft
        # Of sequences that the plan swaps in: the blocks it fills, and the digests to publish full ones under.
        self._filled: dict[SequenceKV, list[tuple[PoolPair, int, bytes | None]]] = {}

    def cost(self, seqs: Sequence[SequenceKV]) -> int:
        """Distinct blocks of both pools that `out` would move."""
        cost = len(self._target.blocks([seq.target for seq in seqs]))
        if self._draft is not None:
            blocks = self._draft.blocks(_drafts(seqs))
            cost += len(blocks) if self._draft.takes(blocks) else 0
        return cost

    def need(self, seqs: Sequence[SequenceKV]) -> int:
        """Free target blocks that `back` takes at most."""
        return len(_slots([_swapped(seq.target) for seq in seqs]))

    def recompute_rows(self, seq: SequenceKV) -> int:
        """Committed target tokens that a release costs: all but those in leading full blocks that others keep."""
        pool = self._target.pool
        blocks = 0
        for block in seq.target.block_ids[: seq.target.committed // pool.block_size]:
            if pool.refs(block) < 2 or not pool.published(block):
                break
            blocks += 1
        return seq.target.committed - blocks * pool.block_size

    def out(self, seqs: Sequence[SequenceKV]) -> tuple[BlockSwap, ...] | None:
        """Device to host, all or nothing. Scratch is dropped, pending copies are undone.

        A block that several of them hold goes once. All their device blocks are given back, published ones stay
        findable: the plan reads them before anything is written. Drafts go along where their host pool has room for
        all of them, else they are dropped.

        Returns:
            Moves for the plan. None, and nothing changed: the host pool has too little room, or KV of one of them
            comes with a swap-in of this very plan.
        """
        tables = [seq.target for seq in seqs]
        blocks = self._target.blocks(tables)
        if not self._target.takes(blocks):
            return None
        swapped, swaps = self._target.take(tables, blocks)
        for seq, table in zip(seqs, swapped, strict=True):
            self._filled.pop(seq, None)
            seq.target = table
            seq.written = 0
        if self._draft is not None:
            drafts = _drafts(seqs)
            blocks = self._draft.blocks(drafts)
            if self._draft.takes(blocks):
                swapped, more = self._draft.take(drafts, blocks)
                swaps += more
            else:
                swapped = self._draft.drop(drafts)
            for seq, table in zip(seqs, swapped, strict=True):
                seq.draft = table
        return tuple(swaps)

    def back(self, seqs: Sequence[SequenceKV]) -> tuple[BlockSwap, ...] | None:
        """Host to device, all or nothing.

        Full blocks that the prefix cache has now are shared instead of moved; the others are published when the plan
        ran. Drafts come back where the draft's pool has room for all of them, else their tables are empty.

        Returns:
            Moves for the plan. None, and nothing changed: too few blocks are free.
        """
        digests = [seq.chain.digests for seq in seqs]
        tables = [_swapped(seq.target) for seq in seqs]
        slots = _slots(tables)
        found = self._target.find(tables, digests)
        if not self._target.fits(slots, found):
            return None
        back, swaps = self._target.bring(tables, slots, found)
        for seq, table in zip(seqs, back, strict=True):
            seq.target = table
        self._fill(self._target, seqs, back)
        if self._draft is not None:
            tables = [_swapped(table) for table in _drafts(seqs)]
            slots = _slots(tables)
            found = self._draft.find(tables, digests)
            if self._draft.fits(slots, found):
                back, more = self._draft.bring(tables, slots, found)
                swaps += more
            else:
                back = self._draft.leave(tables)
            for seq, table in zip(seqs, back, strict=True):
                seq.draft = table
            self._fill(self._draft, seqs, back)
        return tuple(swaps)

    def _fill(self, pair: PoolPair, seqs: Sequence[SequenceKV], tables: Sequence[BlockTable]) -> None:
        for seq, table in zip(seqs, tables, strict=True):
            fills = self._filled.setdefault(seq, [])
            for index, block in enumerate(table.block_ids):
                if block in pair.filling:
                    fills.append((pair, block, seq.chain.digests[index] if index < table.num_hashed else None))

    def forget(self, seq: SequenceKV) -> None:
        """The sequence is about to be released. What the plan was to fill for it is not published."""
        self._filled.pop(seq, None)
        for pair, table in self._tables(seq):
            pair.keep(table)

    def unsettled(self, seq: SequenceKV) -> bool:
        """Whether KV of the sequence, or of one that it was forked from, comes with the plan."""
        return any(not pair.filling.isdisjoint(table.final_blocks()) for pair, table in self._tables(seq))

    def _tables(self, seq: SequenceKV) -> Iterator[tuple[PoolPair, BlockTable]]:
        yield self._target, seq.target
        if self._draft is not None and seq.draft is not None:
            yield self._draft, seq.draft

    def settle(self, failed: bool) -> None:
        """The plan is over: publish what it filled, unless it failed, and give back what it held."""
        if self._filled and not failed:
            for fills in self._filled.values():
                for pair, block, digest in fills:
                    if digest is not None:
                        pair.pool.publish(block, digest)
        self._filled.clear()
        self._target.settle()
        if self._draft is not None:
            self._draft.settle()

    def check(self, seqs: Collection[SequenceKV]) -> None:
        """Assert the pools' counts against the live sequences; tests call it after every operation."""
        self._target.check([seq.target for seq in seqs])
        if self._draft is not None:
            self._draft.check(_drafts(seqs))
        assert self._filled.keys() <= set(seqs)


def named(seqs: Sequence[SequenceKV], live: set[SequenceKV], *, swapped: bool) -> Sequence[SequenceKV]:
    """The sequences, all of them live, distinct and swapped out or not.

    Raises:
        ValueError: they are not.
    """
    if len(set(seqs)) != len(seqs) or not live.issuperset(seqs):
        raise ValueError("a sequence was released before, or is named twice")
    if any(seq.swapped is not swapped for seq in seqs):
        raise ValueError(f"a sequence is {'not ' if swapped else ''}swapped out")
    return seqs


def _drafts(seqs: Iterable[SequenceKV]) -> list[BlockTable]:
    return [seq.draft for seq in seqs if seq.draft is not None]


def _slots(tables: Iterable[SwappedTable]) -> list[int]:
    """Distinct host slots."""
    return list(dict.fromkeys(slot for table in tables for slot in table.slots))


def _swapped(table: BlockTable) -> SwappedTable:
    assert isinstance(table, SwappedTable)
    return table
