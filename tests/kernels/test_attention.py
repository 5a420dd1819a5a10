"""Attention in bfloat16: a row has the same bits alone and in a chunk, in any layout, and is close to the oracle."""

from __future__ import annotations

import pytest
import torch

from specserve.kernels import reference
from specserve.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("native_variants")
CONTEXT = 203  # three tiles of 64 keys and a piece


class Cache:
    """Keys and values of one sequence on scattered blocks; what no token fills is not a number."""

    def __init__(self, dim: int, kv_heads: int, block: int, dtype: torch.dtype, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        blocks = -(-CONTEXT // block)
        keys, values = (torch.randn(CONTEXT, kv_heads, dim, generator=random).to(dtype) for _ in range(2))
        self.table = torch.randperm(blocks + 2, generator=random)[:blocks].to(torch.int32)
        self.key, self.value = (torch.full((blocks + 2, kv_heads, block, dim), torch.nan, dtype=dtype) for _ in "kv")
        for cache, source in ((self.key, keys), (self.value, values)):
            for t in range(CONTEXT):
                cache[self.table[t // block], :, t % block] = source[t]

    def attend(self, op, q: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
        rows = torch.zeros(len(q), dtype=torch.int32)
        return op(q, self.key, self.value, self.table[None], rows, positions, q.shape[2] ** -0.5, window)


def queries(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(CONTEXT, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("dim", "kv_heads", "group"), [(64, 3, 3), (64, 2, 1), (128, 1, 4), (32, 2, 6), (64, 1, 20)])
def test_rows_alone_and_together(dim: int, kv_heads: int, group: int, window: int, dtype: torch.dtype) -> None:
    cache = Cache(dim, kv_heads, 16, dtype)
    q = queries(kv_heads * group, dim, dtype)
    positions = torch.arange(CONTEXT)
    whole = cache.attend(ops.paged_attention, q, positions, window)
    alone = [cache.attend(ops.paged_attention, q[i : i + 1], positions[i : i + 1], window) for i in range(CONTEXT)]
    assert torch.equal(whole, torch.cat(alone))
    for size in (2, 7, 50):
        parts = [
            cache.attend(ops.paged_attention, q[i : i + size], positions[i : i + size], window)
            for i in range(0, CONTEXT, size)
        ]
        assert torch.equal(whole, torch.cat(parts)), size
    backwards = cache.attend(ops.paged_attention, q.flip(0), positions.flip(0), window)
    assert torch.equal(whole, backwards.flip(0))


@pytest.mark.parametrize("block", [1, 8, 48, 64])
def test_blocks_change_no_bit(block: int) -> None:
    q, positions = queries(9, 64, torch.bfloat16), torch.arange(CONTEXT)
    expected = Cache(64, 3, 16, torch.bfloat16).attend(ops.paged_attention, q, positions, 0)
    assert torch.equal(Cache(64, 3, block, torch.bfloat16).attend(ops.paged_attention, q, positions, 0), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    q, positions = queries(9, 64, torch.bfloat16), torch.arange(CONTEXT)
    cache = Cache(64, 3, 16, torch.bfloat16)
    expected = cache.attend(ops.paged_attention, q, positions, 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(cache.attend(ops.paged_attention, q, positions, 0), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (128, 8)])
def test_close_to_the_oracle(dim: int, group: int, window: int) -> None:
    """Weights are rounded to eight bits: each output is off by some thousandths of the values' size at most."""
    q, positions = queries(2 * group, dim, torch.bfloat16), torch.arange(CONTEXT)
    cache = Cache(dim, 2, 16, torch.bfloat16)
    exact = Cache(dim, 2, 16, torch.bfloat16)
    exact.key, exact.value = exact.key.float(), exact.value.float()
    found = cache.attend(ops.paged_attention, q, positions, window).float()
    expected = exact.attend(reference.paged_attention, q.float(), positions, window)
    assert (found - expected).abs().max().item() < 0.02
    assert (found - expected).abs().mean().item() < 0.002


@pytest.mark.parametrize("growth", [0.02, 0.1, 0.5])
def test_scores_that_grow_along_the_context(growth: float) -> None:
    """The best score so far rises slowly or fast: what earlier sums are relative to is kept or not."""
    cache, exact = Cache(64, 3, 16, torch.bfloat16), Cache(64, 3, 16, torch.bfloat16)
    for t in range(CONTEXT):
        cache.key[cache.table[t // 16], :, t % 16, 0] = growth * t
    exact.key, exact.value = cache.key.float(), cache.value.float()
    q, positions = queries(9, 64, torch.bfloat16), torch.arange(CONTEXT)
    q[:, :, 0] = q[:, :, 0].abs() * 4
    whole = cache.attend(ops.paged_attention, q, positions, 0)
    alone = [cache.attend(ops.paged_attention, q[i : i + 1], positions[i : i + 1], 0) for i in range(CONTEXT)]
    assert torch.equal(whole, torch.cat(alone))
    expected = exact.attend(reference.paged_attention, q.float(), positions, 0)
    assert (whole.float() - expected).abs().max().item() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "group", "window"), [(3, 3, 0), (1, 20, 0), (2, 2, 600)])
def test_long_contexts_split_over_threads(kv_heads: int, group: int, window: int, dtype: torch.dtype) -> None:
    """Where there are few rows, pieces of 512 keys are computed apart: no bit depends on it."""
    length, dim = 1300, 64
    random = torch.Generator().manual_seed(2)
    caches = torch.randn(2, 90, kv_heads, 16, dim, generator=random).to(dtype)
    table = torch.randperm(90, generator=random)[:82].int()[None]
    positions = torch.tensor([*range(505, 520), *range(1015, 1030), 1299])
    q = torch.randn(len(positions), kv_heads * group, dim, generator=random).to(dtype)

    def attend(rows: slice) -> torch.Tensor:
        zeros = torch.zeros(len(positions[rows]), dtype=torch.int32)
        return ops.paged_attention(q[rows], *caches, table, zeros, positions[rows], 0.125, window)

    assert int(positions.max()) < length
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(attend(slice(None)))
            found.append(torch.cat([attend(slice(i, i + 1)) for i in range(len(positions))]))
            found.append(torch.cat([attend(slice(i, i + 9)) for i in range(0, len(positions), 9)]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    zeros = torch.zeros(len(positions), dtype=torch.int32)
    exact = reference.paged_attention(q.float(), *caches.float(), table, zeros, positions, 0.125, window)
    assert (found[0].float() - exact).abs().max().item() < 0.01
