"""HostBlocks: where KV blocks wait that gave their place in the cache up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specserve.kernels.cpu import ops
from specserve.kernels.cpu.move import Blocks, move
from specserve.kernels.kv_layout import dtype_of
from specserve.models.kv_cache import PagedKVCache

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch


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
        self._shape = (num_blocks, *cache.shape[:2], *cache.shape[3:])
        self._block_bytes = cache.nbytes // cache.num_blocks if cache.num_blocks else 0
        self._memory = np.empty(num_blocks * self._block_bytes if cache.memory.size else 0, np.uint8)

    @cached_property
    def storage(self) -> torch.Tensor:
        dtype = dtype_of(self._cache.dtype)
        if self._cache.memory.size:
            return torch.from_numpy(self._memory).view(dtype).view(self._shape)
        pinned = self._cache.storage.is_cuda and self.num_blocks > 0
        return torch.empty(self._shape, dtype=dtype, pin_memory=pinned)

    @property
    def num_blocks(self) -> int:
        return self._shape[0]

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (block of the cache, slot), no slot twice. Raises IndexError for what is not there."""
        if self._cache.movable:
            move(self._cache.blocks, self._blocks(self._cache.blocks), pairs)
        else:
            ops.swap_out(self._cache.storage, self.storage, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (block of the cache, slot) back, no block twice. Raises IndexError for what is not there."""
        if self._cache.movable:
            move(self._blocks(self._cache.blocks), self._cache.blocks, [(slot, block) for block, slot in pairs])
        else:
            ops.swap_in(self._cache.storage, self.storage, pairs)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._shape = (0, *self._shape[1:])
        self._memory = self._memory[:0].copy()
        self.__dict__.pop("storage", None)

    def _blocks(self, cache: Blocks) -> Blocks:
        """Of this memory, with the pieces that the cache's blocks have."""
        return Blocks(
            self._memory.ctypes.data, self.num_blocks, cache.planes, cache.piece, cache.piece, self._block_bytes
        )
