"""Keys and values in int8: what is stored, that rows do not depend on each other, and how close it is to the oracle."""

from __future__ import annotations

import pytest
import torch

from specserve.kernels import kv_layout, reference
from specserve.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("native_variants")
HEADS, KV_HEADS, BLOCK = 6, 2, 16
CONTEXT = 600  # more than one piece of 512 keys


def empty_caches(dim: int, block: int, tokens: int = CONTEXT) -> torch.Tensor:
    return torch.zeros(
        2, *kv_layout.layer_shape(-(-tokens // block), KV_HEADS, block, dim, torch.int8), dtype=torch.int8
    )


def rope_inputs(dim: int, dtype: torch.dtype, rows: int = 30):
    random = torch.Generator().manual_seed(dim)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * dim, generator=random).to(dtype)
    qkv[3] = 0.0  # heads of nothing but zeros have a scale of zero
    angle = torch.arange(100.0)[:, None] * torch.rand(dim // 2, generator=random)
    positions, slots = torch.randint(0, 100, (rows,), generator=random), torch.randperm(64, generator=random)[:rows]
    return qkv, angle.cos(), angle.sin(), positions, slots


@pytest.mark.parametrize("path", [ops, reference], ids=["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 24])
def test_stored_heads_are_their_numbers_times_their_scale(path, dtype: torch.dtype, dim: int) -> None:
    qkv, cos, sin, positions, slots = rope_inputs(dim, dtype)
    exact = torch.zeros(2, *kv_layout.layer_shape(4, KV_HEADS, BLOCK, dim, torch.float32))
    reference.rope_store(qkv.float(), HEADS, KV_HEADS, cos, sin, positions, *exact, slots)
    caches = empty_caches(dim, BLOCK, 64)
    path.rope_store(qkv, HEADS, KV_HEADS, cos, sin, positions, *caches, slots)
    for cache, rows in zip(caches, exact, strict=True):
        assert kv_layout.block_size_of(cache, dim) == BLOCK
        found = kv_layout.load_rows(cache, slots // BLOCK, slots % BLOCK, dim)
        expected = kv_layout.load_rows(rows, slots // BLOCK, slots % BLOCK, dim)
        step = expected.abs().amax(-1, keepdim=True) / 127
        assert bool(((found - expected).abs() <= 0.51 * step + 1e-7).all())
        assert bool((kv_layout.numbers(cache, dim)[slots // BLOCK, :, slots % BLOCK].abs().amax(-1) <= 127).all())
        assert bool((found[3] == 0).all())
        assert int((kv_layout.scales(cache, dim) != 0).sum()) == (len(slots) - 1) * KV_HEADS, "nothing else is written"


@pytest.mark.parametrize("path", [ops, reference], ids=["native", "reference"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_does_not_become_so(path, value: float) -> None:
    qkv, cos, sin, positions, slots = rope_inputs(64, torch.float32)
    qkv[5, -7] = value  # in the last head's v
    _, values = caches = empty_caches(64, BLOCK, 64)
    path.rope_store(qkv, HEADS, KV_HEADS, cos, sin, positions, *caches, slots)
    finite = kv_layout.load_rows(values, slots // BLOCK, slots % BLOCK, 64).isfinite().flatten(1)
    assert not finite[5, 64:].any()
    assert finite.sum() == finite.numel() - 64


class Cache:
    def __init__(self, dim: int, block: int) -> None:
        random = torch.Generator().manual_seed(dim)
        self.kv = torch.randn(2, CONTEXT, KV_HEADS, dim, generator=random)
        self.kv *= torch.rand(2, CONTEXT, KV_HEADS, 1, generator=random) * 2
        self.caches = empty_caches(dim, block, CONTEXT + 2 * block)
        self.caches.view(torch.uint8).fill_(0xFF)  # scales that no token fills are not numbers
        blocks = -(-CONTEXT // block)
        self.table = torch.randperm(blocks + 2, generator=random)[:blocks]
        at = torch.arange(CONTEXT)
        slots = self.table[at // block] * block + at % block
        for cache, rows in zip(self.caches, self.kv, strict=True):
            kv_layout.store_rows(cache, slots, rows)

    def attend(self, op, q: torch.Tensor, positions: torch.Tensor, window: int = 0) -> torch.Tensor:
        rows = torch.zeros(len(q), dtype=torch.int32)
        return op(q, *self.caches, self.table.int()[None], rows, positions, q.shape[2] ** -0.5, window)


def queries(rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, HEADS, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dim", "window"), [(64, 0), (128, 70)])
def test_rows_alone_and_together(dtype: torch.dtype, dim: int, window: int) -> None:
    cache, q, positions = Cache(dim, BLOCK), queries(90, dim, dtype), torch.arange(CONTEXT - 90, CONTEXT)
    whole = cache.attend(ops.paged_attention, q, positions, window)
    for size in (1, 7, 40):
        parts = [
            cache.attend(ops.paged_attention, q[i : i + size], positions[i : i + size], window)
            for i in range(0, len(q), size)
        ]
        assert torch.equal(whole, torch.cat(parts)), size
    for block in (1, 8, 48, 64):
        assert torch.equal(Cache(dim, block).attend(ops.paged_attention, q, positions, window), whole), block


@pytest.mark.parametrize(("dtype", "largest", "mean"), [(torch.bfloat16, 0.02, 0.002), (torch.float32, 1e-5, 1e-6)])
def test_close_to_the_oracle(dtype: torch.dtype, largest: float, mean: float) -> None:
    """The oracle reads the same int8 keys and values in float32: what differs is the arithmetic alone."""
    cache, q, positions = Cache(64, BLOCK), queries(60, 64, dtype), torch.arange(CONTEXT - 60, CONTEXT)
    found = cache.attend(ops.paged_attention, q, positions).float()
    expected = cache.attend(reference.paged_attention, q.float(), positions)
    assert (found - expected).abs().max().item() < largest
    assert (found - expected).abs().mean().item() < mean


def test_close_to_what_was_not_rounded() -> None:
    cache, q, positions = Cache(64, BLOCK), queries(60, 64, torch.float32), torch.arange(CONTEXT - 60, CONTEXT)
    found = cache.attend(ops.paged_attention, q, positions)
    exact = [rows.transpose(0, 1)[None].contiguous() for rows in cache.kv]  # one block of all tokens
    zeros, one = torch.zeros(60, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    expected = reference.paged_attention(q, *exact, one, zeros, positions, 64**-0.5)
    assert (found - expected).abs().mean().item() < 0.01 * expected.abs().mean().item() + 0.002
