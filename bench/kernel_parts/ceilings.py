"""What the machine can do at most, by native code that does nothing else (kernels/cpu/peaks.cpp)."""

from __future__ import annotations

from enum import Enum
from functools import partial

import torch

from bench.kernel_parts.measure import Bench, in_turn

PIECE = 1 << 16  # bytes that the native code reads at a time
# Streams side by side, and bytes that lines are prefetched ahead.
WAYS = ((1, 0), (1, 1024), (1, 2048), (1, 4096), (2, 0), (2, 2048), (4, 0), (4, 1024))
UNITS = 300  # of work a thread: some milliseconds


class Peak(Enum):
    """Ways to multiply, by the numbers of ss_peak_operations; the best of a way's numbers is its peak."""

    FLOAT32 = (0,)
    BF16_VECTORS = (1,)
    INT8_VECTORS = (2,)
    BF16_TILES = (3, 4)
    INT8_TILES = (5, 6)
    INT8_TILES_SCALED = (7,)
    INT8_TILES_STORED = (8,)


LABELS = {
    Peak.FLOAT32: "peak of float32 FMA",
    Peak.BF16_VECTORS: "peak of bf16 pairs on vectors",
    Peak.INT8_VECTORS: "peak of int8 dots on vectors",
    Peak.BF16_TILES: "peak of bf16 tiles",
    Peak.INT8_TILES: "peak of int8 tiles",
}


class Ceilings:
    """The ceilings of one bench; each call measures anew."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._way = WAYS[0]
        self.has = {peak for peak in Peak if self.operations(peak) > 0}

    @property
    def tiles(self) -> bool:
        """Whether this instruction set has tile registers."""
        return Peak.BF16_TILES in self.has

    @property
    def bf16_vectors(self) -> Peak:
        """The best that vectors have for products with bfloat16 weights: without instructions for them, float32's."""
        return Peak.BF16_VECTORS if Peak.BF16_VECTORS in self.has else Peak.FLOAT32

    @property
    def bf16(self) -> Peak:
        """The best that this instruction set has for them."""
        return Peak.BF16_TILES if self.tiles else self.bf16_vectors

    def read(self, memory: torch.Tensor) -> float:
        """GB/s of one pass over memory, the way that choose_way found."""
        return self._read(memory, self._way)

    def operations(self, peak: Peak) -> float:
        """GFLOP/s (or GOP/s) of a way to multiply; 0 where there are no instructions for it."""
        bench = self._bench
        found = [bench.library.ss_peak_operations(i, UNITS * bench.threads, bench.threads) for i in peak.value]
        return float(max(found)) / 1e9

    def choose_way(self, memory: torch.Tensor) -> None:
        """Find the fastest way to read; `memory` is of the size that will be read."""
        best = 0.0
        for way in WAYS:
            rates = [self._read(memory, way) for _ in range(4)]
            if max(rates[1:]) > best:
                best, self._way = max(rates[1:]), way

    def _read(self, memory: torch.Tensor, way: tuple[int, int]) -> float:
        size = memory.numel() // PIECE * PIECE
        seconds = self._bench.library.ss_peak_read(memory.data_ptr(), size, *way, self._bench.threads)
        return size / float(seconds) / 1e9


def ceilings(bench: Bench) -> Ceilings:
    """Measure and record all of them."""
    bench.say("ceilings")
    found = Ceilings(bench)
    memory = bench.arena[: bench.settings.streamed]
    found.choose_way(memory)
    repeats = bench.settings.repeats
    (rates,) = in_turn(repeats, lambda: found.read(memory))
    bench.add(f"read bandwidth, {memory.numel() / 1e6:.0f} MB on huge pages", rates, "GB/s")
    for peak, label in LABELS.items():
        if peak in found.has:
            (rates,) = in_turn(repeats, partial(found.operations, peak))
            bench.add(label, rates, "GOP/s" if "int8" in label else "GFLOP/s")
    if Peak.INT8_TILES_SCALED in found.has:
        _bound_of_scales(bench, found)
    return found


def _bound_of_scales(bench: Bench, found: Ceilings) -> None:
    """Why tiles get quantised weights in 16 bits: int8 tiles that are left for a scale every 32 inputs are slower."""
    peaks = (Peak.INT8_TILES_STORED, Peak.INT8_TILES_SCALED, Peak.INT8_TILES, Peak.BF16_TILES)
    values = in_turn(bench.settings.repeats, *(partial(found.operations, peak) for peak in peaks))
    stored, scaled, int8, bf16 = values
    bench.add("int8 tiles left every 32 inputs, scaling free, of the int8 peak", stored, "GOP/s", int8)
    bench.add("int8 tiles with scales per 32 inputs: the most there is, of the int8 peak", scaled, "GOP/s", int8)
    bench.add("bf16 tiles, of the int8 peak", bf16, "GFLOP/s", int8)
