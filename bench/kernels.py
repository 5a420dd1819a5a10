"""Each native kernel against what the machine can do at most, measured in turn with it: read bandwidth for what streams
through memory, the peak of its instructions for what multiplies.

Every instruction set that this machine runs has a process of its own, with all CPUs of the process and with one thread.
The ceilings are native code that does nothing else (kernels/cpu/peaks.cpp), on memory of the same size and pages and
with random operands. Names read "instruction set x threads: what"; `baseline` is the ceiling, `ratio` the fraction.

Where there are tile registers, quantised weights and their inputs are numbers of two bytes, whose product is four of
bytes: a quarter of the int8 peak, which the goal is about, is the most. The rows on int8 tiles with scales per 32
inputs show why: they are the most that any kernel that keeps such weights in int8 could reach. Products are held
against the bfloat16 peak and the vectors' peaks too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.common import Row, finish
from bench.kernel_parts.measure import FULL, QUICK, Settings
from specserve.kernels.cpu.isa import runnable

CHILD = Path(__file__).resolve().parent / "kernel_parts" / "child.py"


class ChildFailed(Exception):
    """The process of an instruction set ended without all of its rows; what it said is on the standard error."""


def answers(isa: str, settings: Settings, say: Callable[[str], None]) -> Iterator[Row]:
    """The rows that a child finds. Raises ChildFailed."""
    command = [sys.executable, str(CHILD), json.dumps(asdict(settings))]
    environment = {**os.environ, "SPECSERVE_ISA": isa, "SPECSERVE_NATIVE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            if "row" in told:
                yield Row(**told["row"])
            else:
                say(told["say"])
    if process.returncode:
        raise ChildFailed(f"{isa}: status {process.returncode}")


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> int:
    names = [variant.name for variant in runnable()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=names, nargs="+", default=names, help="instruction sets, default all")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({cpus(), 1}, reverse=True))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--no-forward", action="store_true", help="leave the demo model out")
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement: kept as kernels_quick.json")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    arguments = parser.parse_args()
    size = dict(QUICK if arguments.quick else FULL)
    size["repeats"] = arguments.repeats or size["repeats"]
    settings = Settings(threads=arguments.threads, forward=not arguments.no_forward, **size)
    rows: list[Row] = []
    with Progress() as progress:
        task = progress.add_task("", total=len(arguments.isa))

        def say(isa: str, what: str) -> None:
            progress.update(task, description=f"{isa}: {what}")

        for isa in arguments.isa:
            rows += answers(isa, settings, partial(say, isa))
            progress.advance(task)
    return finish("kernels_quick" if arguments.quick else "kernels", rows, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
