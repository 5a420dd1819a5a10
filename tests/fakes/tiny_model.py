"""A tiny deterministic language model on the paged cache: embedding, one attention read, output layer.

Each row is computed by itself, in float64, so that its logits depend on its own context alone, bit for bit.
"""

from __future__ import annotations

import math

import torch

from specserve.models.batch import ForwardBatch
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache


class TinyModel:
    """Logits from the row's token and what attention reads of its sequence. `sharpness` scales the logits.

    Args:
        width: of the logits; padding beyond `vocab` gets a large logit, so that unmasked padding is noticed.
    """

    def __init__(
        self,
        *,
        vocab: int = 48,
        width: int | None = None,
        hidden: int = 8,
        seed: int = 0,
        sharpness: float = 3.0,
        max_position: int = 512,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.embedding = torch.randn(width or vocab, hidden, generator=random, dtype=torch.float64)
        self.mixing = torch.randn(3, hidden, hidden, generator=random, dtype=torch.float64) / math.sqrt(hidden)
        self.output = torch.randn(width or vocab, hidden, generator=random, dtype=torch.float64) * sharpness
        self.info = ModelInfo(
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=hidden,
            hidden_size=hidden,
            vocab_size=width or vocab,
            max_position=max_position,
            dtype="float32",
            name="tiny",
        )
        self.rows = 0  # computed so far
        self.forwards = 0

    def cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        # Blocks start as garbage: a read of what was never written must show.
        cache = PagedKVCache(1, num_blocks, block_size, 1, self.info.hidden_size, torch.float32)
        cache.key[0].fill_(1e3)
        cache.value[0].fill_(1e3)
        return cache

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        batch.check(cache.num_blocks, cache.block_size)
        assert int(batch.positions.max()) < self.info.max_position
        self.rows += batch.num_rows
        self.forwards += 1
        size = self.info.hidden_size
        keys, values = cache.key[0].view(-1, size), cache.value[0].view(-1, size)
        for token, position, slot in zip(
            batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True
        ):
            x = self.embedding[token]
            keys[slot] = (self.mixing[0] @ x + 0.1 * (position % 7)).float()
            values[slot] = (self.mixing[1] @ x).float()
        logits = [self._logits(batch, int(row), keys, values, cache.block_size) for row in batch.logit_rows]
        return torch.stack(logits) if logits else torch.empty(0, self.info.vocab_size)

    def _logits(
        self, batch: ForwardBatch, row: int, keys: torch.Tensor, values: torch.Tensor, block_size: int
    ) -> torch.Tensor:
        length = int(batch.positions[row]) + 1
        table = torch.from_numpy(batch.block_tables[int(batch.row_sequence[row])]).long()
        position = torch.arange(length)
        slots = table[position // block_size] * block_size + position % block_size
        x = self.embedding[int(batch.token_ids[row])]
        scores = keys[slots].double() @ (self.mixing[2] @ x)
        read = torch.softmax(scores / math.sqrt(self.info.head_dim), 0) @ values[slots].double()
        logits = (self.output @ torch.tanh(x + read)).float()
        logits[self.vocab :] = 1e4
        return logits
