"""How one layer's keys (or values) lie in the paged cache.

[num_blocks, num_kv_heads, block_size, dim]: what one head of a block holds is contiguous. In int8 a head of a block is
its numbers [block_size, dim] and then one float32 scale for each of its tokens, so that blocks are moved as they are:
[num_blocks, num_kv_heads, block_size * (dim + 4)].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

SCALE_BYTES = 4
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}  # of one number, scales aside


def name_of(dtype: str | torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def head_bytes(dim: int, dtype: str | torch.dtype) -> int:
    """Bytes of one head of one token, K or V."""
    name = name_of(dtype)
    return dim * ITEM_BYTES[name] + (SCALE_BYTES if name == "int8" else 0)


def layer_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, dim: int, dtype: str | torch.dtype
) -> tuple[int, ...]:
    """Shape of one layer's keys (or values).

    Raises:
        ValueError: int8 with a `dim` that would leave the scales unaligned.
    """
    if name_of(dtype) != "int8":
        return (num_blocks, num_kv_heads, block_size, dim)
    if dim % SCALE_BYTES:
        raise ValueError(f"keys and values in int8 need a head dimension that is a multiple of 4, not {dim}")
    return (num_blocks, num_kv_heads, block_size * head_bytes(dim, dtype))


def check_pairs(pairs: Sequence[tuple[int, int]], first: int, second: int) -> None:
    """Raises IndexError where a pair of block numbers is not below `first` and below `second`."""
    for a, b in pairs:
        if not (0 <= a < first and 0 <= b < second):
            raise IndexError(f"blocks ({a}, {b}) are not below ({first}, {second})")


def block_size_of(cache: torch.Tensor, dim: int) -> int:
    """Tokens of one block of a layer's keys or values."""
    return cache.shape[2] // head_bytes(dim, torch.int8) if cache.dtype == torch.int8 else cache.shape[2]


def numbers(cache: torch.Tensor, dim: int) -> torch.Tensor:
    """View [num_blocks, num_kv_heads, block_size, dim] of what was stored; in int8 to be multiplied by `scales`."""
    if cache.dtype != torch.int8:
        return cache
    size = block_size_of(cache, dim)
    return cache[..., : size * dim].view(*cache.shape[:2], size, dim)


def scales(cache: torch.Tensor, dim: int) -> torch.Tensor:
    """View float32 [num_blocks, num_kv_heads, block_size] of an int8 layer's scales."""
    return cache[..., block_size_of(cache, dim) * dim :].view(torch.float32)


def store_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Keep rows [n, num_kv_heads, dim] in `slots` (int64 [n], block * block_size + offset).

    In int8 the greatest magnitude of each head of each row becomes 127; ties are rounded to even.
    """
    dim = rows.shape[2]
    size = block_size_of(cache, dim)
    blocks, offsets = slots // size, slots % size
    if cache.dtype == torch.int8:
        rows = rows.float()
        top = rows.abs().amax(-1)
        unit = torch.where(top > 0, 127.0 / top, 0.0)
        scales(cache, dim)[blocks, :, offsets] = top / 127.0
        rows = torch.round(rows * unit[..., None])
    numbers(cache, dim)[blocks, :, offsets] = rows.to(cache.dtype)


def load_rows(cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 [..., num_kv_heads, dim] of the tokens at (blocks, offsets), int64 tensors that broadcast together."""
    rows = numbers(cache, dim)[blocks, :, offsets].float()
    return rows * scales(cache, dim)[blocks, :, offsets][..., None] if cache.dtype == torch.int8 else rows
