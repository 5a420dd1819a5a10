"""Batches over paged caches, and a driver that runs token lists through a model in chosen chunks and layouts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specserve.models.batch import ForwardBatch
from specserve.models.kv_cache import PagedKVCache


def make_cache(info, num_blocks: int, block_size: int) -> PagedKVCache:
    return PagedKVCache(info.num_layers, num_blocks, block_size, info.num_kv_heads, info.head_dim, info.dtype)


def make_batch(
    chunks: Sequence[tuple[Sequence[int], int, Sequence[int]]], block_size: int, logits: str = "all"
) -> ForwardBatch:
    """Of (token ids, start, block ids) a sequence. `logits` is "all" or "last"."""
    tokens, positions, slots, sequence, segments, last = [], [], [], [], [], []
    for line, (ids, start, blocks) in enumerate(chunks):
        segments.append((len(tokens), len(ids), line, start))
        for offset, token in enumerate(ids):
            position = start + offset
            tokens.append(token)
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
            sequence.append(line)
        last.append(len(tokens) - 1)
    width = max(len(blocks) for _, _, blocks in chunks)
    tables = [list(blocks) + [0] * (width - len(blocks)) for _, _, blocks in chunks]
    rows = list(range(len(tokens))) if logits == "all" else last
    return ForwardBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slots=np.array(slots, dtype=np.int64),
        row_sequence=np.array(sequence, dtype=np.int32),
        block_tables=np.array(tables, dtype=np.int32),
        logit_rows=np.array(rows, dtype=np.int64),
        segments=segments,
    )


@dataclass
class Paged:
    """One model with its cache; blocks are handed out in a shuffled order."""

    model: object
    num_blocks: int = 64
    block_size: int = 16
    seed: int = 0
    cache: PagedKVCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = make_cache(self.model.info, self.num_blocks, self.block_size)
        self._free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self._free)

    def blocks(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def forward(self, chunks, logits: str = "all") -> torch.Tensor:
        batch = make_batch(chunks, self.block_size, logits)
        batch.check(self.num_blocks, self.block_size)
        return self.model.forward(batch, self.cache)

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Of every position of one sequence, computed alone in chunks; float32 [len(token_ids), vocab_size]."""
        blocks, size = self.blocks(len(token_ids)), chunk or len(token_ids)
        parts = [
            self.forward([(token_ids[first : first + size], first, blocks)]) for first in range(0, len(token_ids), size)
        ]
        return torch.cat(parts)
