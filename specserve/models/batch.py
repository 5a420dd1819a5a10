"""ForwardBatch: the rows of one forward. No padding and no phases: every row is one token of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch


@dataclass(slots=True)
class ForwardBatch:
    """What one forward computes. Rows of one sequence are adjacent and in position order.

    A row at position p attends to positions 0..p of its sequence through the block table; its own K and V are stored
    before attention, so rows of one step see each other.

    Attributes:
        token_ids: int64 [n].
        positions: int64 [n], from 0.
        slots: int64 [n], block_id * block_size + offset, where the row's K and V are stored.
        row_sequence: int32 [n], the row's line of `block_tables`.
        block_tables: int32 [num_seqs, max_blocks], padded with 0.
        logit_rows: int64 [m], rows whose logits are returned, in this order.
        segments: (first row, number of rows, line of block_tables, position of the first row) of each sequence.
        kept: these very arrays come again, written in place, with the next batches of the same shape: a model may keep
            pointers to them as long as it keeps the batch.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    row_sequence: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int64]
    segments: list[tuple[int, int, int, int]] = field(default_factory=list)
    kept: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def tensors(self) -> BatchTensors:
        """The same for models that run in torch."""
        return BatchTensors(
            torch.from_numpy(self.token_ids),
            torch.from_numpy(self.positions),
            torch.from_numpy(self.slots),
            torch.from_numpy(self.row_sequence),
            torch.from_numpy(self.block_tables),
            torch.from_numpy(self.logit_rows),
        )

    def check(self, num_blocks: int, block_size: int) -> None:
        """Assert the invariants against a cache of that shape; tests call it before a forward."""
        n = self.num_rows
        assert self.positions.shape == self.slots.shape == self.row_sequence.shape == (n,)
        assert self.token_ids.dtype == self.positions.dtype == self.slots.dtype == self.logit_rows.dtype == np.int64
        assert self.row_sequence.dtype == self.block_tables.dtype == np.int32
        assert sum(count for _, count, _, _ in self.segments) == n
        for first, count, sequence, start in self.segments:
            for row in range(first, first + count):
                position = start + row - first
                block = int(self.block_tables[sequence, position // block_size])
                assert int(self.row_sequence[row]) == sequence
                assert int(self.positions[row]) == position
                assert 0 <= block < num_blocks
                assert int(self.slots[row]) == block * block_size + position % block_size
        assert self.logit_rows.size == 0 or 0 <= int(self.logit_rows.min()) <= int(self.logit_rows.max()) < n


@dataclass(slots=True)
class BatchTensors:
    """A ForwardBatch's arrays as tensors over the same memory."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_sequence: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
