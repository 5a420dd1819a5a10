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


def build_batch(items: Sequence[Rows], num_logits: Sequence[int], block_size: int) -> ForwardBatch:
    """The rows of each item at positions start, start + 1, ...

    Args:
        items: one sequence each; block_ids cover start + len(token_ids) positions.
        num_logits: for each item how many of its last rows return logits.
    """
    counts = np.array([len(i.token_ids) for i in items], dtype=np.int64)
    starts = np.array([i.start for i in items], dtype=np.int64)
    first = np.cumsum(counts) - counts
    sequence = np.repeat(np.arange(len(items), dtype=np.int64), counts)
    positions = np.arange(len(sequence), dtype=np.int64) + np.repeat(starts - first, counts)
    tables = _tables(items, -(-(starts + counts) // block_size))
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


def _tables(items: Sequence[Rows], blocks: np.ndarray) -> np.ndarray:
    """int32 [n, most blocks], each line the item's first blocks[i] block ids, then 0."""
    tables = np.zeros((len(items), int(blocks.max(initial=0))), dtype=np.int32)
    for line, item, count in zip(tables, items, blocks.tolist(), strict=True):
        line[:count] = item.block_ids[:count]
    return tables


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [counts.sum()]: for each i the rows ends[i] - counts[i] .. ends[i] - 1."""
    before = np.cumsum(counts) - counts
    rows: np.ndarray = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(ends - counts - before, counts)
    return rows
