"""Attention and the moves of KV blocks against the machine's limits; `bench/kernels.py` shows the rows.

Every function gives rows (name, achieved, ceiling): bytes a second against the read bandwidth of a buffer of the same
size on the same kind of pages, measured in turn with the kernel so that both see the same machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from specserve.kernels.cpu import ops
from specserve.kernels.cpu.memory import huge
from specserve.models.kv_cache import PagedKVCache

Row = tuple[str, float, float]
HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 9, 3, 64, 16, 30  # the demo model
REPEATS = 7


def decode(rows: int, context: int, dtype: torch.dtype = torch.bfloat16, threads: int = 2) -> Row:
    """One decode step's attention over all layers; keys and values are read once for all heads of a KV head."""
    cache, tables = _filled_cache(rows, context, dtype)
    q = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    sequence, positions = torch.arange(rows, dtype=torch.int32), torch.full((rows,), context - 1)
    out = torch.empty(rows, HEADS * DIM, dtype=q.dtype)

    def step() -> None:
        for key, value in zip(cache.key, cache.value, strict=True):
            ops.paged_attention(q, key, value, tables, sequence, positions, DIM**-0.5, 0, out)

    read = cache.storage.nbytes * rows * (context // BLOCK) // cache.num_blocks
    name = f"attention, {rows} x {context} tokens, {str(dtype).removeprefix('torch.')} KV"
    return _against_reading(name, step, read, threads)


def copies(blocks: int = 512, threads: int = 2) -> Row:
    """Copy-on-write of whole blocks: every byte is read once and written once, and counts once."""
    cache, _ = _filled_cache(1, 2 * blocks * BLOCK, torch.bfloat16)
    pairs = [(i, blocks + i) for i in range(blocks)]
    read = cache.storage.nbytes // cache.num_blocks * blocks
    return _against_reading(f"copy of {blocks} blocks", lambda: cache.copy_blocks(pairs), read, threads)


def all_rows(threads: int = 2) -> list[Row]:
    """What the bench shows."""
    shapes = [(8, 2048), (1, 2048), (32, 256)]
    rows = [decode(*shape, dtype, threads) for dtype in (torch.bfloat16, torch.int8) for shape in shapes]
    return [*rows, copies(threads=threads)]


def _filled_cache(rows: int, context: int, dtype: torch.dtype) -> tuple[PagedKVCache, torch.Tensor]:
    """A cache of so many sequences, each on blocks that follow each other as they do in a fresh pool."""
    blocks = context // BLOCK
    cache = PagedKVCache(LAYERS, rows * blocks + 1, BLOCK, KV_HEADS, DIM, dtype)
    # Small positive numbers in bfloat16; in int8, the same bytes are numbers and tiny scales.
    cache.storage.view(torch.int16).random_(0x3C00, 0x3E00, generator=torch.Generator().manual_seed(1))
    return cache, torch.arange(1, rows * blocks + 1, dtype=torch.int32).view(rows, blocks)


def _against_reading(name: str, kernel: Callable[[], None], nbytes: int, threads: int) -> Row:
    buffer = torch.from_numpy(huge(nbytes // 4 * 4)).fill_(1).view(torch.int32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernel()
        achieved, ceiling = [], []
        for _ in range(REPEATS):
            achieved.append(nbytes / _seconds(kernel))
            ceiling.append(nbytes / _seconds(lambda: buffer.max()))
    finally:
        torch.set_num_threads(before)
    return name, statistics.median(achieved), statistics.median(ceiling)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    for title, achieved, ceiling in all_rows():
        print(f"{title:45} {achieved / 1e9:6.1f} of {ceiling / 1e9:6.1f} GB/s: {achieved / ceiling:.2f}")
