"""How long a step takes: seconds = base + per_row * rows + per_context * tokens read from the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a machine, as far as a memory manager sees it.

    Attributes:
        base: seconds of a step that computes nothing much: reading the weights, launching kernels.
        per_row: seconds a row (token computed) adds.
        per_context: seconds a token of KV that is read adds.
        slots: tokens that the KV memory holds.
        max_tokens: context of the model; what a system reserves that knows nothing of the output's length.
        max_rows: rows a step at most.
        max_running: requests that run at once at most.
        block_size: tokens a block of paged memory.
    """

    name: str
    base: float
    per_row: float
    per_context: float
    slots: int
    max_tokens: int = 2048
    max_rows: int = 2048
    max_running: int = 256
    block_size: int = 16

    def seconds(self, rows: int, context: int) -> float:
        return self.base + self.per_row * rows + self.per_context * context


def a100_13b() -> Machine:
    """A 13B model in fp16 on an A100 with 40 GB: the paper's first server (Kwon et al. 2023, table 1).

    26 GB of weights and, of the KV (2 * 40 layers * 5120 * 2 bytes = 800 KiB a token), all that is live are read in
    each step at the card's 1.55 TB/s; 8 ms go to launches, sampling and the rest of an iteration. A row costs 2 * 13e9
    floating-point operations at 140 of the card's 312 TFLOP/s. 12 GiB of KV are 15,728 slots.
    """
    token_bytes = 2 * 40 * 5120 * 2
    bandwidth = 1.55e12
    return Machine(
        "A100, 13B model",
        base=26e9 / bandwidth + 0.008,
        per_row=2 * 13e9 / 140e12,
        per_context=token_bytes / bandwidth,
        slots=12 * 2**30 // token_bytes,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Totals of one timed run: steps, rows and tokens of KV read over all steps, and the seconds that it took."""

    steps: int
    rows: int
    context: int
    seconds: float


def fit(runs: Sequence[Measured]) -> tuple[float, float, float]:
    """(base, per_row, per_context) of least relative squares, none below 0. Wants runs of different shapes (>= 3)."""
    matrix = np.array([[r.steps, r.rows, r.context] for r in runs], dtype=np.float64)
    seconds = np.array([r.seconds for r in runs])
    kept = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept] / seconds[:, None], np.ones(len(runs)), rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        del kept[int(found.argmin())]  # a part that comes out negative is not there
    parts = [0.0, 0.0, 0.0]
    for index, value in zip(kept, found, strict=True):
        parts[index] = max(float(value), 0.0)
    return parts[0], parts[1], parts[2]
