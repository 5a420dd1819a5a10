"""Products with packed weights: one row against read bandwidth, many rows against the peak of multiplication.

The rows are made into what the weights take beforehand. The sums go where the forward has them: into float32, into the
residual, or through the gate into what the next product takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernel_parts.ceilings import Ceilings, Peak
from bench.kernel_parts.measure import Bench, in_turn, joined
from specserve.kernels.cpu.memory import huge
from specserve.kernels.cpu.packing import Kind, pack_rows, packed_bytes, row_bytes

LAYERS = 30
# The demo model's: outputs and inputs, and how many a forward has.
SHAPES = {
    "qkv": (960, 576, LAYERS),
    "output": (576, 576, LAYERS),
    "gate_up": (3072, 576, LAYERS),
    "down": (576, 1536, LAYERS),
    "head": (49152, 576, 1),
}
STORED, ADDED, GATED = 0, 1, 2  # uses that ss_bench_gemm knows
USES = {"output": ADDED, "gate_up": GATED, "down": ADDED}
KINDS = {Kind.BF16: "bf16", Kind.Q8: "q8", Kind.Q4_0: "q4_0", Kind.Q4_1: "q4_1"}
HEADROOM = 64 << 20  # more than the bytes of the largest of them, packed
ROWS = (8, 32, 64, 256)
GEMV_GOALS = {Kind.BF16: 0.80, Kind.Q8: 0.80, Kind.Q4_0: 0.70, Kind.Q4_1: 0.70}
BF16_GOAL, INT8_GOAL = 0.70, 0.55  # of the best peaks, at the most rows
OF = {
    Peak.FLOAT32: "float32",
    Peak.BF16_VECTORS: "bf16 on vectors",
    Peak.INT8_VECTORS: "int8 on vectors",
    Peak.BF16_TILES: "bf16 tiles",
    Peak.INT8_TILES: "int8 tiles",
}


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of one packed matrix, uint8 [copies * bytes of one], one after the other."""

    kind: Kind
    n: int
    k: int
    memory: torch.Tensor
    copies: int
    use: int = STORED

    @property
    def each(self) -> int:
        return self.memory.numel() // self.copies


def weights(bench: Bench, kind: Kind, n: int, k: int, use: int = STORED) -> Weights:
    """At least `streamed` bytes of them in the arena."""
    each = packed_bytes(kind, n, k)
    copies = -(-bench.settings.streamed // each)
    memory = bench.arena[: copies * each]
    first = memory[:each]
    pack_rows(kind, k, _random_rows(kind, n, k), first.numpy())
    memory.view(copies, each)[1:] = first
    return Weights(kind, n, k, memory, copies, use)


def _random_rows(kind: Kind, n: int, k: int) -> torch.Tensor:
    """Rows as files hold them: random bits, so that no unit draws less power than it would."""
    random = torch.Generator().manual_seed(n * k)
    if kind is Kind.BF16:
        return torch.randn(n, k, generator=random).bfloat16().view(torch.uint8)
    rows = torch.randint(0, 256, (n, row_bytes(kind, k)), generator=random, dtype=torch.uint8)
    numbers = 2 if kind is Kind.Q4_1 else 1
    scale = torch.full((numbers,), 0.01, dtype=torch.float16).view(torch.uint8)
    rows.view(n, k // 32, -1)[..., : 2 * numbers] = scale
    return rows


def seconds(bench: Bench, w: Weights, rows: int, copies: int) -> float:
    """Seconds for the product of random rows with each of `copies` copies."""
    x = torch.randn(rows, w.k, generator=torch.Generator().manual_seed(rows)).bfloat16()
    out = huge(4 * rows * w.n)
    out.fill(0)  # new pages would be taken in the timed part
    pointers = (w.memory.data_ptr(), copies, x.data_ptr(), out.ctypes.data)
    return float(bench.library.ss_bench_gemm(w.kind, w.n, w.k, *pointers, rows, w.use, bench.threads))


def products(bench: Bench, ceilings: Ceilings) -> None:
    """Rows for each kind of weights, by shape and for all of a model's products or a layer's together."""
    for kind, label in KINDS.items():
        gemv: dict[str, list[list[float]]] = {}
        gemm: dict[int, list[tuple[float, list[list[float]]]]] = {rows: [] for rows in ROWS}
        for name, (n, k, count) in SHAPES.items():
            bench.say(f"{label} {name}")
            w = weights(bench, kind, n, k, USES.get(name, STORED))
            gemv[name] = _gemv(bench, ceilings, w)
            bench.add(f"GEMV {label} {name} {n}x{k}", *_against(gemv[name], "GB/s"), GEMV_GOALS[kind])
            if name == "head":  # only rows that are sampled meet it
                continue
            for rows in ROWS:
                found = _gemm(bench, ceilings, w, rows)
                gemm[rows].append((float(n * k * count), found))
                if rows == ROWS[-1]:
                    _add_gemm(bench, ceilings, kind, f"{name} {n}x{k}, {rows} rows", found, goal=True)
        parts = [(float(packed_bytes(kind, n, k) * count), gemv[name]) for name, (n, k, count) in SHAPES.items()]
        bench.add(f"GEMV {label}, all of the model's", *_against(_joined(parts), "GB/s"), GEMV_GOALS[kind])
        for rows, found_parts in gemm.items():
            name = f"all of a layer's, {rows} rows"
            _add_gemm(bench, ceilings, kind, name, _joined(found_parts), goal=rows == ROWS[-1])


def _gemv(bench: Bench, ceilings: Ceilings, w: Weights) -> list[list[float]]:
    """GB/s of packed bytes, and of reading the same memory."""
    return in_turn(
        bench.settings.repeats,
        lambda: w.memory.numel() / seconds(bench, w, 1, w.copies) / 1e9,
        lambda: ceilings.read(w.memory),
    )


def _peaks(ceilings: Ceilings, kind: Kind) -> list[Peak]:
    """What operations are held against: first the best peak, which the goals are about, then others. With tiles,
    products of 16 bits are four of int8.
    """
    if kind is Kind.BF16:
        return [Peak.BF16_TILES, ceilings.bf16_vectors] if ceilings.tiles else [ceilings.bf16_vectors]
    return [Peak.INT8_TILES, Peak.BF16_TILES, Peak.INT8_VECTORS] if ceilings.tiles else [Peak.INT8_VECTORS]


def _gemm(bench: Bench, ceilings: Ceilings, w: Weights, rows: int) -> list[list[float]]:
    """GFLOP/s of the product, and of the peaks."""
    copies = min(w.copies, -(-bench.settings.multiplied // w.each))
    operations = 2.0 * w.n * w.k * rows * copies
    return in_turn(
        bench.settings.repeats,
        lambda: operations / seconds(bench, w, rows, copies) / 1e9,
        *(partial(ceilings.operations, peak) for peak in _peaks(ceilings, w.kind)),
    )


def _add_gemm(
    bench: Bench, ceilings: Ceilings, kind: Kind, name: str, found: Sequence[Sequence[float]], goal: bool
) -> None:
    wanted = (BF16_GOAL if kind is Kind.BF16 else INT8_GOAL) if goal else None
    for i, (peak, rates) in enumerate(zip(_peaks(ceilings, kind), found[1:], strict=True)):
        label = f"GEMM {KINDS[kind]} {name}, of the peak of {OF[peak]}"
        bench.add(label, found[0], "GFLOP/s", rates, None if i else wanted)


def _joined(parts: Sequence[tuple[float, list[list[float]]]]) -> list[list[float]]:
    """Of parts that follow each other: (work, [figures, ceilings ..]) of each -> [figures, ceilings ..]."""
    return [joined([(work, found[i]) for work, found in parts]) for i in range(len(parts[0][1]))]


def _against(found: Sequence[list[float]], unit: str) -> tuple[list[float], str, list[float]]:
    return found[0], unit, found[1]
