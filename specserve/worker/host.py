"""HostBlocks: where KV blocks wait that gave their place in the cache up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specserve.kernels.cpu.ops import swap_in, swap_out
from specserve.models.kv_cache import PagedKVCache


class HostBlocks:
    """Host memory for `num_blocks` blocks of one cache.

    Which slot is in use is not known here: whoever makes the plans decides. A slot keeps what it holds until it is
    written again.

    Attributes:
        storage: [num_blocks, 2, num_layers, block_size, num_kv_heads, head_dim] of the cache's dtype: a block's KV lies
            together. Pinned where the cache is on a GPU; else its pages are taken from the system as they are written.
    """

    def __init__(self, cache: PagedKVCache, num_blocks: int) -> None:
        self._cache = cache
        planes, block = cache.storage.shape[:2], cache.storage.shape[3:]
        self.storage = torch.empty(
            num_blocks, *planes, *block, dtype=cache.dtype, pin_memory=cache.storage.is_cuda and num_blocks > 0
        )

    @property
    def num_blocks(self) -> int:
        return len(self.storage)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (block of the cache, slot), no slot twice. Raises IndexError for what is not there."""
        swap_out(self._cache.storage, self.storage, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (block of the cache, slot) back, no block twice. Raises IndexError for what is not there."""
        swap_in(self._cache.storage, self.storage, pairs)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self.storage = self.storage[:0].clone()
