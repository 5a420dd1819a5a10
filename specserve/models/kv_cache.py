"""PagedKVCache: the memory that block ids point into."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specserve.kernels.cpu.memory import huge_zeros
from specserve.kernels.cpu.ops import copy_blocks
from specserve.kernels.kv_layout import layer_shape


class PagedKVCache:
    """K and V of every layer in blocks of `block_size` tokens.

    Attributes:
        storage: [2, num_layers, num_blocks, num_kv_heads, block_size, head_dim], K then V, contiguous; int8 with scales
            as `kernels.kv_layout` describes.
        key, value: one tensor [num_blocks, num_kv_heads, block_size, head_dim] a layer, parts of `storage`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        # Zeros, not empty: memory that was never written must not hold NaN, which would survive a masked product. The
        # pages are touched only when they are written.
        shape = (2, num_layers, *layer_shape(num_blocks, num_kv_heads, block_size, head_dim, dtype))
        on_cpu = torch.device(device).type == "cpu"
        self.storage = huge_zeros(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self.key: tuple[torch.Tensor, ...] = tuple(self.storage[0].unbind(0))
        self.value: tuple[torch.Tensor, ...] = tuple(self.storage[1].unbind(0))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block src to dst in every layer, for each (src, dst), in order."""
        copy_blocks(self.storage, pairs)
