"""What it costs to start and to end one piece of work on all threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bench.kernel_parts.measure import Bench, in_turn

RUNS = 1000


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that takes all the time it gets."""
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # from here on it is at it
        yield
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def fork_join(bench: Bench) -> None:
    """Nanoseconds of a run of the pool: with nothing to do, and with all threads coming to it."""
    if bench.threads == 1:
        return  # there is no one to wait for
    bench.say("the pool")
    _add(bench, "")
    with busy_process():
        _add(bench, ", one other process busy")


def _add(bench: Bench, when: str) -> None:
    for together, what in ((0, "nothing to do"), (1, "all come")):
        seconds = torch.zeros(RUNS, dtype=torch.float64)
        means: list[float] = []

        def measure(together: int = together, seconds: torch.Tensor = seconds, means: list[float] = means) -> float:
            bench.library.ss_peak_fork_join(seconds.data_ptr(), RUNS, together, bench.threads)
            means.append(float(seconds.mean()) * 1e9)
            return float(seconds.median()) * 1e9

        (medians,) = in_turn(bench.settings.repeats, measure)
        bench.add(f"fork and join, {what}{when}, median", medians, "ns")
        bench.add(f"fork and join, {what}{when}, mean", means[1:], "ns")
