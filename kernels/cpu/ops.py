"""The ops on CPU: native where the library is there and takes the shape, else the reference. Signatures are its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specserve.kernels import kv_layout, reference
from specserve.kernels.cpu.move import Blocks, move
from specserve.kernels.cpu.native import library
from specserve.kernels.lazy import num_threads

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

__all__ = [
    "add_rms_norm",
    "apply_bitmask_",
    "argmax",
    "copy_blocks",
    "gumbel",
    "log_softmax",
    "paged_attention",
    "rms_norm",
    "rope_store",
    "silu_mul",
    "swap_in",
    "swap_out",
]

_NAMES = {"float32": "f32", "bfloat16": "bf16"}
MAX_HEAD_DIM = 256
MAX_ROPE_DIM = 512


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    return _norm(x, None, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    return _norm(x, residual, weight, eps, out)


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> torch.Tensor:
    lib = library()
    name = f"ss_norm_{_NAMES.get(kv_layout.name_of(x.dtype))}_{_NAMES.get(kv_layout.name_of(weight.dtype))}"
    if lib is None or not hasattr(lib, name) or not x.is_contiguous():
        if residual is None:
            return reference.rms_norm(x, weight, eps, out)
        return reference.add_rms_norm(x, residual, weight, eps, out)
    result = torch.empty(x.shape, dtype=weight.dtype) if out is None else out
    width = x.shape[-1]
    getattr(lib, name)(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        result.data_ptr(),
        x.numel() // width,
        width,
        eps,
        num_threads(),
    )
    return result


def rope_store(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    lib = library()
    name = _cached_name("ss_rope_store", qkv.dtype, key_cache.dtype)
    dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    if lib is None or not hasattr(lib, name) or qkv.stride(1) != 1 or dim > MAX_ROPE_DIM:
        reference.rope_store(
            qkv, num_heads, num_kv_heads, cos, sin, positions, key_cache, value_cache, slots, q_norm, k_norm, eps
        )
        return
    getattr(lib, name)(
        qkv.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        qkv.shape[0],
        qkv.stride(0),
        num_heads,
        num_kv_heads,
        kv_layout.block_size_of(key_cache, dim),
        dim,
        eps,
        num_threads(),
    )


def _cached_name(op: str, dtype: torch.dtype, cache: torch.dtype) -> str:
    """The C function for rows of one type on a cache of another; none has that name where it is not supported."""
    name = f"{op}_{_NAMES.get(kv_layout.name_of(dtype))}"
    return name if cache == dtype else f"{name}_int8" if cache == torch.int8 else f"{name}_{cache}"


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_sequence: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    out: torch.Tensor | None = None,
    tree: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    lib = library()
    n, num_heads, dim = q.shape
    name = _cached_name("ss_attention", q.dtype, key_cache.dtype)
    takes = dim % 16 == 0 and dim <= MAX_HEAD_DIM and q.stride(2) == 1 and q.stride(1) == dim
    if lib is None or not hasattr(lib, name) or not takes:
        return reference.paged_attention(
            q, key_cache, value_cache, block_tables, row_sequence, positions, scale, window, out, tree
        )
    result = torch.empty(n, num_heads * dim, dtype=q.dtype) if out is None else out
    context, masks = tree if tree is not None else (None, None)
    assert masks is None or masks.is_contiguous()
    getattr(lib, name)(
        q.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        result.data_ptr(),
        block_tables.data_ptr(),
        row_sequence.data_ptr(),
        positions.data_ptr(),
        None if context is None else context.data_ptr(),
        None if masks is None else masks.data_ptr(),
        n,
        q.stride(0),
        block_tables.stride(0),
        num_heads,
        key_cache.shape[1],
        dim,
        kv_layout.block_size_of(key_cache, dim),
        0 if masks is None else masks.shape[1],
        scale,
        window,
        num_threads(),
    )
    return result


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    lib = library()
    if lib is None or kv_layout.name_of(gate_up.dtype) not in _NAMES or not gate_up.is_contiguous():
        return reference.silu_mul(gate_up, out)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(rows, width, dtype=gate_up.dtype) if out is None else out
    function = getattr(lib, f"ss_silu_mul_{_NAMES[kv_layout.name_of(gate_up.dtype)]}")
    function(gate_up.data_ptr(), result.data_ptr(), rows, width, num_threads())
    return result


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    lib = library()
    if lib is None or logits.dtype != torch.float32 or not logits.is_contiguous():
        return reference.log_softmax(logits)
    result = torch.empty_like(logits)
    lib.ss_log_softmax(logits.data_ptr(), result.data_ptr(), *logits.shape, num_threads())
    return result


def argmax(logits: torch.Tensor) -> torch.Tensor:
    lib = library()
    if lib is None or logits.dtype != torch.float32 or not logits.is_contiguous():
        return reference.argmax(logits)
    result = torch.empty(logits.shape[0], dtype=torch.int64)
    lib.ss_argmax(logits.data_ptr(), result.data_ptr(), *logits.shape, num_threads())
    return result


def apply_bitmask_(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    lib = library()
    if lib is None or logits.dtype != torch.float32 or not (logits.is_contiguous() and mask.is_contiguous()):
        return reference.apply_bitmask_(logits, mask)
    lib.ss_apply_bitmask(logits.data_ptr(), mask.data_ptr(), *logits.shape, mask.shape[1], num_threads())
    return logits


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    lib = library()
    if lib is None or not (seeds.is_contiguous() and positions.is_contiguous()):
        return reference.gumbel(seeds, positions, vocab)
    result = torch.empty(seeds.shape[0], vocab, dtype=torch.float32)
    lib.ss_gumbel(seeds.data_ptr(), positions.data_ptr(), result.data_ptr(), seeds.shape[0], vocab, num_threads())
    return result


def copy_blocks(storage: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    if not _movable(storage):
        reference.copy_blocks(storage, pairs)
        return
    blocks = _blocks(storage, 2)
    move(blocks, blocks, pairs)


def swap_out(storage: torch.Tensor, host: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    if not _movable(storage, host):
        reference.swap_out(storage, host, pairs)
        return
    move(_blocks(storage, 2), _blocks(host, 0), pairs)


def swap_in(storage: torch.Tensor, host: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    if not _movable(storage, host):
        reference.swap_in(storage, host, pairs)
        return
    move(_blocks(host, 0), _blocks(storage, 2), [(slot, device) for device, slot in pairs])


def _movable(*memories: torch.Tensor) -> bool:
    return library() is not None and all(m.is_contiguous() and m.device.type == "cpu" for m in memories)


def _blocks(memory: torch.Tensor, dim: int) -> Blocks:
    """Of contiguous memory that numbers blocks along a dimension: storage 2, host 0."""
    layer = 1 if dim == 2 else 2
    planes = memory.shape[1] * memory.shape[layer] if dim == 0 else memory.shape[0] * memory.shape[1]
    size = memory.itemsize
    piece = memory.stride(2) * size  # K or V of one block and layer: whole in both layouts
    return Blocks(
        memory.data_ptr(), memory.shape[dim], planes, piece, memory.stride(layer) * size, memory.stride(dim) * size
    )
