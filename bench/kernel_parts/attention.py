"""Attention over a paged cache: decode against read bandwidth, chunks of prompts against the peak of bfloat16."""

from __future__ import annotations

import torch

from bench.kernel_parts.ceilings import Ceilings
from bench.kernel_parts.measure import Bench, in_turn

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
CONTEXT = 2048
ROWS = (1, 8, 32)
CHUNKS = (256, CONTEXT)
GOAL = 0.60


class Paged:
    """Sequences of 2,048 tokens in layers of a bfloat16 cache, their blocks scattered over it.

    Attributes:
        keys, values: bfloat16 [layers, blocks, kv heads, block, dim], in the bench's arena.
    """

    def __init__(self, bench: Bench, sequences: int) -> None:
        blocks = sequences * CONTEXT // BLOCK
        layer = blocks * KV_HEADS * BLOCK * DIM
        self.layers = max(1, bench.settings.streamed // (4 * layer))
        self.memory = bench.arena[: 4 * layer * self.layers]
        numbers = self.memory.view(torch.bfloat16).view(2, self.layers, blocks, KV_HEADS, BLOCK, DIM)
        random = torch.Generator().manual_seed(sequences)
        numbers[:] = torch.randn(64, KV_HEADS, BLOCK, DIM, generator=random).bfloat16().repeat(blocks // 64, 1, 1, 1)
        self.keys, self.values = numbers[0], numbers[1]
        self.tables = torch.randperm(blocks, generator=random).to(torch.int32).view(sequences, -1)

    def seconds(self, bench: Bench, sequence: torch.Tensor, positions: torch.Tensor, layers: int) -> float:
        """Seconds for `layers` layers of rows at positions (int64 [rows]) of sequences (int32 [rows])."""
        rows = len(positions)
        q = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(rows)).bfloat16()
        out = torch.empty_like(q)
        pointers = (q, self.keys, self.values, out, self.tables, sequence, positions)
        return float(
            bench.library.ss_bench_attention(
                *(tensor.data_ptr() for tensor in pointers),
                layers,
                self.keys.stride(0),
                rows,
                self.tables.stride(0),
                HEADS,
                KV_HEADS,
                DIM,
                BLOCK,
                bench.threads,
            )
        )


def attention(bench: Bench, ceilings: Ceilings) -> None:
    for rows in ROWS:
        bench.say(f"attention, {rows} rows")
        _decode(bench, ceilings, rows)
    bench.say("attention of prompts")
    paged = Paged(bench, 1)
    for rows in CHUNKS:
        _chunk(bench, ceilings, paged, rows)


def _decode(bench: Bench, ceilings: Ceilings, rows: int) -> None:
    paged = Paged(bench, rows)
    sequence = torch.arange(rows, dtype=torch.int32)
    positions = torch.full((rows,), CONTEXT - 1)
    rates, read = in_turn(
        bench.settings.repeats,
        lambda: paged.memory.numel() / paged.seconds(bench, sequence, positions, paged.layers) / 1e9,
        lambda: ceilings.read(paged.memory),
    )
    bench.add(f"decode attention, context {CONTEXT}, {rows} rows", rates, "GB/s", read, GOAL)


def _chunk(bench: Bench, ceilings: Ceilings, paged: Paged, rows: int) -> None:
    """The last `rows` rows of a prompt of 2,048."""
    sequence = torch.zeros(rows, dtype=torch.int32)
    positions = torch.arange(CONTEXT - rows, CONTEXT)
    layers = min(4, paged.layers)
    operations = 4.0 * DIM * HEADS * float((positions + 1).sum()) * layers
    rates, peak = in_turn(
        bench.settings.repeats,
        lambda: operations / paged.seconds(bench, sequence, positions, layers) / 1e9,
        lambda: ceilings.operations(ceilings.bf16),
    )
    bench.add(f"prompt attention, last {rows} of {CONTEXT} rows, of the bf16 peak", rates, "GFLOP/s", peak)
