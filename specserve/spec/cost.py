"""CostModel: seconds of a step against its rows and the depth of its drafting, measured while serving."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MAX_WEIGHT = 16.0  # of one cell; the newest sixteenth of its average is the newest step
HALF_LIFE = 2048  # steps after which a cell that was not seen again counts half
RIDGE = 1e-6
UNTIMED = 3  # first steps, in which memory is touched and code is loaded for the first time


@dataclass(slots=True)
class _Cell:
    """Steps of one size: average seconds, how well known, when last seen."""

    rows: float
    depth: int
    seconds: float
    weight: float
    seen: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """seconds = base + per_row * rows + per_depth * depth, near the size it was asked for."""

    base: float
    per_row: float
    per_depth: float

    def seconds(self, rows: float, depth: int = 0) -> float:
        return self.base + self.per_row * rows + self.per_depth * depth


class CostModel:
    """Averages by size of step, and an affine fit through them near the size in question.

    Averages of sizes stay when a load runs at one size for long, so a steady state never makes the fit degenerate.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._step = 0

    def observe(self, rows: int, depth: int, seconds: float) -> None:
        """A step of `rows` target rows, with `depth` forwards of a draft model, took `seconds`."""
        if rows <= 0 or not seconds > 0:
            return
        self._step += 1
        if self._step <= UNTIMED:
            return
        cell = self._cells.get(key := (_bucket(rows), depth))
        if cell is None:
            self._cells[key] = _Cell(float(rows), depth, seconds, 1.0, self._step)
            return
        cell.weight = min(cell.weight + 1.0, MAX_WEIGHT)
        # A stall (page fault, another process) must not look like the cost of the size: faster steps count more.
        weight = cell.weight if seconds > cell.seconds else min(cell.weight, 4.0)
        cell.seconds += (min(seconds, 4 * cell.seconds) - cell.seconds) / weight
        cell.rows += (rows - cell.rows) / cell.weight
        cell.seen = self._step

    @property
    def known_sizes(self) -> int:
        """Different numbers of rows measured so far."""
        return len({bucket for bucket, _ in self._cells})

    def fit(self, rows: float) -> StepCost | None:
        """The affine cost near `rows`; None before two sizes are known. Relative errors are what is minimised."""
        if self.known_sizes < 2:
            return None
        cells = list(self._cells.values())
        size = np.array([c.rows for c in cells])
        depth = np.array([float(c.depth) for c in cells])
        seconds = np.array([c.seconds for c in cells])
        weight = np.array([c.weight * 0.5 ** ((self._step - c.seen) / HALF_LIFE) for c in cells])
        weight /= (1.0 + np.log2(size / max(rows, 1.0)) ** 2) * seconds**2
        columns = [np.ones_like(size), size, depth]
        solution = _non_negative(columns, seconds, weight)
        return StepCost(*solution)


def _non_negative(columns: list[np.ndarray], target: np.ndarray, weight: np.ndarray) -> list[float]:
    """Weighted least squares; a coefficient that comes out negative is 0 and the rest is fitted again."""
    active = list(range(len(columns)))
    result = [0.0] * len(columns)
    while active:
        x = np.stack([columns[i] for i in active], axis=1) * np.sqrt(weight)[:, None]
        y = target * np.sqrt(weight)
        gram = x.T @ x
        gram[np.diag_indices_from(gram)] *= 1.0 + RIDGE
        gram[np.diag_indices_from(gram)] += 1e-30
        values = np.linalg.solve(gram, x.T @ y)
        if (values >= 0).all():
            for i, value in zip(active, values, strict=True):
                result[i] = float(value)
            break
        active.pop(int(np.argmin(values)))
    return result


def _bucket(rows: int) -> int:
    """Exact up to 16 rows, then steps of a quarter octave."""
    return rows if rows <= 16 else 16 + math.ceil(4 * math.log2(rows / 16))
