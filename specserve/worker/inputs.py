"""StepPlan to ForwardBatch: whole arrays at a time, nothing per token."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specserve.models.batch import ForwardBatch

SPARE = 16  # blocks: tables of decodes are as wide as a multiple of it, so that they seldom grow


class Rows(Protocol):
    """Rows of one sequence: a ScheduledRequest or DraftRows."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...


class BatchBuilder:
    """Makes the batches of one runner, each of which is used up before the next is made.

    Decoding steps follow each other with the same requests: their arrays are made once and written in place.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._decodes = _Decodes(0, 0)

    def build(self, items: Sequence[Rows], num_logits: Sequence[int]) -> ForwardBatch:
        """The rows of each item at positions start, start + 1, ...

        Args:
            items: one sequence each; block_ids cover start + len(token_ids) positions.
            num_logits: for each item how many of its last rows return logits.
        """
        size = self._block_size
        tables = []
        decoding = True
        for i, wanted in zip(items, num_logits, strict=True):
            count, ids = len(i.token_ids), i.block_ids
            decoding = decoding and count == wanted == 1
            blocks = (i.start + count + size - 1) // size
            tables.append(ids if len(ids) == blocks else ids[:blocks])
        if not decoding:
            return _mixed(items, num_logits, tables, size)
        width = max(map(len, tables), default=0)
        if not self._decodes.fits(len(items), width):
            self._decodes = _Decodes(len(items), width)
        return self._decodes.write(items, tables, size)


class _Decodes:
    """The batch of steps with one row, and its logits, for each of `count` sequences of up to `width` blocks."""

    def __init__(self, count: int, width: int) -> None:
        self._count, self._width = count, -(-width // SPARE) * SPARE
        numbers = np.zeros((3, count), dtype=np.int64)
        # Written without numpy, whose code is not in the caches after a forward.
        self._numbers, self._pack = numbers.data, struct.Struct(f"={3 * count}q").pack_into
        self._tables = np.zeros((count, self._width), dtype=np.int32)
        self._lines: list[list[int]] = [[] for _ in range(count)]
        tokens, positions, slots = numbers
        self._batch = ForwardBatch(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            row_sequence=np.arange(count, dtype=np.int32),
            block_tables=self._tables,
            logit_rows=np.arange(count, dtype=np.int64),
            kept=True,
        )

    def fits(self, count: int, width: int) -> bool:
        return count == self._count and width <= self._width < width + 2 * SPARE

    def write(self, items: Sequence[Rows], tables: Sequence[Sequence[int]], block_size: int) -> ForwardBatch:
        """A line of the block tables is written only as it changes."""
        starts = [i.start for i in items]
        slots = [table[-1] * block_size + start % block_size for table, start in zip(tables, starts, strict=True)]
        self._pack(self._numbers, 0, *[i.token_ids[0] for i in items], *starts, *slots)
        for i, (line, table) in enumerate(zip(self._lines, tables, strict=True)):
            if line != table:
                self._lines[i] = list(table)
                self._tables[i, : len(table)] = table
                self._tables[i, len(table) :] = 0
        self._batch.segments = [(i, 1, i, start) for i, start in enumerate(starts)]
        return self._batch


def build_batch(items: Sequence[Rows], num_logits: Sequence[int], block_size: int) -> ForwardBatch:
    """One batch alone; see BatchBuilder.build."""
    return BatchBuilder(block_size).build(items, num_logits)


def _mixed(
    items: Sequence[Rows], num_logits: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int
) -> ForwardBatch:
    """Items of any number of rows."""
    tables = np.zeros((len(items), max(map(len, block_ids), default=0)), dtype=np.int32)
    for line, ids in zip(tables, block_ids, strict=True):
        line[: len(ids)] = ids
    counts = np.array([len(i.token_ids) for i in items], dtype=np.int64)
    starts = np.array([i.start for i in items], dtype=np.int64)
    first = np.cumsum(counts) - counts
    sequence = np.repeat(np.arange(len(items), dtype=np.int64), counts)
    positions = np.arange(len(sequence), dtype=np.int64) + np.repeat(starts - first, counts)
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    wanted = np.array(num_logits, dtype=np.int64)
    tokens = np.concatenate([np.array(i.token_ids, dtype=np.int64) for i in items])
    return ForwardBatch(
        token_ids=tokens,
        positions=positions,
        slots=slots,
        row_sequence=sequence.astype(np.int32),
        block_tables=tables,
        logit_rows=_last_rows(first + counts, wanted),
        segments=list(zip(first.tolist(), counts.tolist(), range(len(items)), starts.tolist(), strict=True)),
    )


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [counts.sum()]: for each i the rows ends[i] - counts[i] .. ends[i] - 1."""
    before = np.cumsum(counts) - counts
    rows: np.ndarray = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(ends - counts - before, counts)
    return rows
