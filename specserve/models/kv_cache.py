"""PagedKVCache: the memory that block ids point into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from specserve.kernels.cpu import ops
from specserve.kernels.cpu.memory import huge
from specserve.kernels.cpu.move import Blocks, move
from specserve.kernels.cpu.native import library
from specserve.kernels.kv_layout import ITEM_BYTES, dtype_of, layer_shape, name_of

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch


class PagedKVCache:
    """K and V of every layer in blocks of `block_size` tokens.

    Args:
        dtype: "float32", "bfloat16" or "int8", or torch's.

    Attributes:
        shape: (2, num_layers, num_blocks, num_kv_heads, block_size, head_dim), K then V, contiguous; int8 with scales
            as `kernels.kv_layout` describes.
        memory: uint8 [nbytes], where all of it is; empty on a device, which has `storage` alone.
        storage: a tensor of that shape.
        key, value: one tensor [num_blocks, num_kv_heads, block_size, head_dim] a layer, parts of `storage`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str | torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = name_of(dtype)
        self.shape = (2, num_layers, *layer_shape(num_blocks, num_kv_heads, block_size, head_dim, self.dtype))
        self.nbytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        self._device = device
        # Zeros, not empty: memory that was never written must not hold NaN, which would survive a masked product. The
        # pages are touched only when they are written.
        self.memory = huge(self.nbytes if device == "cpu" else 0)

    @cached_property
    def storage(self) -> torch.Tensor:
        dtype = dtype_of(self.dtype)
        if self._device != "cpu":
            return torch.zeros(self.shape, dtype=dtype, device=self._device)
        return torch.from_numpy(self.memory).view(dtype).view(self.shape)

    @cached_property
    def key(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.storage[0].unbind(0))

    @cached_property
    def value(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.storage[1].unbind(0))

    @property
    def layer_bytes(self) -> int:
        """Of K or V."""
        return self.nbytes // (2 * self.num_layers)

    @property
    def movable(self) -> bool:
        """Whether the native moves can be had and reach `blocks`."""
        return self._device == "cpu" and library() is not None

    @cached_property
    def blocks(self) -> Blocks:
        """Where they are in `memory`."""
        piece = self.layer_bytes // self.num_blocks if self.num_blocks else 0
        return Blocks(
            self.memory.ctypes.data, self.num_blocks, 2 * self.num_layers, piece, self.num_blocks * piece, piece
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block src to dst in every layer, for each (src, dst), in order."""
        if self.movable:
            move(self.blocks, self.blocks, pairs)
        else:
            ops.copy_blocks(self.storage, pairs)
