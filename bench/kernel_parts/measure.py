"""What the parts of the kernels' bench share: what a child is told, figures taken in turn, and rows named alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bench.common import Row, row

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured.

    Attributes:
        threads: numbers of threads, each measured by itself.
        repeats: of each figure, after one more that warms up.
        streamed: bytes that a pass over weights or keys and values takes from memory.
        multiplied: bytes of weights that a pass of a GEMM takes.
        forward: whether the demo model's forward is measured.
    """

    threads: Sequence[int]
    repeats: int
    streamed: int
    multiplied: int
    forward: bool


FULL = {"repeats": 7, "streamed": 256 * MB, "multiplied": 32 * MB}
QUICK = {"repeats": 2, "streamed": 48 * MB, "multiplied": 4 * MB}


@dataclass(slots=True)
class Bench:
    """One instruction set with one number of threads, and the rows found so far.

    Attributes:
        arena: memory on huge pages, of more than `settings.streamed` bytes, that the parts use one after the other.
        say: called with what is measured next.
    """

    library: ctypes.CDLL
    isa: str
    threads: int
    settings: Settings
    arena: torch.Tensor
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        name: str,
        values: Sequence[float],
        unit: str,
        ceiling: Sequence[float] | None = None,
        goal: float | None = None,
    ) -> None:
        """A figure, of the ceiling that was measured in turn with it where there is one."""
        self.rows.append(row(f"{self.prefix}{name}", values, unit, baseline=ceiling, goal_ratio=goal))

    @property
    def prefix(self) -> str:
        return f"{self.isa} x{self.threads}: "


def in_turn(repeats: int, *measures: Callable[[], float]) -> list[list[float]]:
    """What each of the measures gives, `repeats` times in turn; a first round is dropped.

    What else the machine does then meets the figure and its ceiling alike.
    """
    found: list[list[float]] = [[] for _ in measures]
    for round_ in range(repeats + 1):
        for values, measure in zip(found, measures, strict=True):
            value = measure()
            if round_:
                values.append(value)
    return found


def joined(parts: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    """Rate of work done part after part: (work, rates of it) of each -> rates of all, repeat by repeat."""
    total = sum(work for work, _ in parts)
    return [total / sum(work / rates[i] for work, rates in parts) for i in range(min(len(r) for _, r in parts))]
