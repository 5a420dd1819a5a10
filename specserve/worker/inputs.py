"""StepPlan to ForwardBatch: whole arrays at a time, nothing per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from specserve.models.batch import ForwardBatch


class Rows(Protocol):
    """Rows of one sequence: a ScheduledRequest or DraftRows."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...


class Tables:
    """Block tables of the sequences of a step, one a line, kept from step to step: a line is written as it changes."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), dtype=np.int32)
        self._lines: list[list[int]] = []

    def fill(self, tables: Sequence[Sequence[int]]) -> np.ndarray:
        """int32 [len(tables), longest], padded with 0."""
        width = max(map(len, tables), default=0)
        if len(tables) > self._array.shape[0] or width > self._array.shape[1]:
            rows, columns = max(len(tables), self._array.shape[0]), max(2 * width, self._array.shape[1])
            self._array = np.zeros((rows, columns), dtype=np.int32)
            self._lines = [[] for _ in range(rows)]
        lines = self._lines
        for i, table in enumerate(tables):
            if lines[i] != table:
                lines[i] = list(table)
                self._array[i, : len(table)] = table
                self._array[i, len(table) :] = 0
        return self._array[: len(tables), :width].copy()


class BatchBuilder:
    """Makes the batches of one runner. What does not change from one step to the next is kept."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables = Tables()
        self._order = _Order(0)

    def build(self, items: Sequence[Rows], num_logits: Sequence[int]) -> ForwardBatch:
        """The rows of each item at positions start, start + 1, ...

        Args:
            items: one sequence each; block_ids cover start + len(token_ids) positions.
            num_logits: for each item how many of its last rows return logits.
        """
        size = self._block_size
        tables = []
        for i in items:
            blocks = (i.start + len(i.token_ids) + size - 1) // size
            ids = i.block_ids
            tables.append(ids if len(ids) == blocks else ids[:blocks])
        array = self._tables.fill(tables)
        if len(items) == sum(num_logits) == sum([len(i.token_ids) for i in items]) and min(num_logits, default=0) == 1:
            return self._decodes(items, tables, array)
        return _mixed(items, num_logits, array, size)

    def _decodes(self, items: Sequence[Rows], tables: Sequence[Sequence[int]], array: np.ndarray) -> ForwardBatch:
        """One row of each, all with logits: nothing is to be laid out."""
        size, count = self._block_size, len(items)
        starts = [i.start for i in items]
        slots = [table[-1] * size + start % size for table, start in zip(tables, starts, strict=True)]
        numbers = torch.from_numpy(np.array([[i.token_ids[0] for i in items], starts, slots], dtype=np.int64))
        if count != len(self._order.rows):
            self._order = _Order(count)
        order = self._order
        return ForwardBatch(
            token_ids=numbers[0],
            positions=numbers[1],
            slots=numbers[2],
            row_sequence=order.lines,
            block_tables=torch.from_numpy(array),
            logit_rows=order.rows,
            segments=[(i, 1, i, start) for i, start in enumerate(starts)],
        )


class _Order:
    """0, 1, ..., count - 1 as rows and as lines of the block tables."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(count)
        self.lines = torch.arange(count, dtype=torch.int32)


def build_batch(items: Sequence[Rows], num_logits: Sequence[int], block_size: int) -> ForwardBatch:
    """One batch alone; see BatchBuilder.build."""
    return BatchBuilder(block_size).build(items, num_logits)


def _mixed(items: Sequence[Rows], num_logits: Sequence[int], tables: np.ndarray, block_size: int) -> ForwardBatch:
    """Items of any number of rows. tables int32 [len(items), most blocks]."""
    counts = np.array([len(i.token_ids) for i in items], dtype=np.int64)
    starts = np.array([i.start for i in items], dtype=np.int64)
    first = np.cumsum(counts) - counts
    sequence = np.repeat(np.arange(len(items), dtype=np.int64), counts)
    positions = np.arange(len(sequence), dtype=np.int64) + np.repeat(starts - first, counts)
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    wanted = np.array(num_logits, dtype=np.int64)
    tokens = np.concatenate([np.array(i.token_ids, dtype=np.int64) for i in items])
    return ForwardBatch(
        token_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        row_sequence=torch.from_numpy(sequence.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.from_numpy(_last_rows(first + counts, wanted)),
        segments=list(zip(first.tolist(), counts.tolist(), range(len(items)), starts.tolist(), strict=True)),
    )


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [counts.sum()]: for each i the rows ends[i] - counts[i] .. ends[i] - 1."""
    before = np.cumsum(counts) - counts
    rows: np.ndarray = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(ends - counts - before, counts)
    return rows
