"""From `LLM(...)` to the first token, each time in a new process: with packed weights in the cache, and without.

What was imported before does not count, and nothing heavy is: numpy comes with the first LLM, and torch, which plain
requests do without, later. The uncached runs have a cache of their own that shares all with the user's but
the packed weights; the file itself is in the system's memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.common import Row, finish, row

GOALS = {"cached": 2.0, "uncached": 10.0}  # seconds, median
WEIGHTS = {"auto": "q4", "q8": "q8", "none": "bfloat16"}
PROGRAM = """
import sys, time
from specserve import LLM, SamplingParams
began = time.perf_counter()
with LLM("demo", quantization=sys.argv[1]) as llm:
    llm.generate("Hello", SamplingParams(max_tokens=1))
    print(time.perf_counter() - began)
"""


def first_token(quantization: str, home: Path) -> float:
    """Seconds from `LLM("demo")` to its first token in a process of its own."""
    environment = {**os.environ, "SPECSERVE_HOME": str(home)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles this package
    command = [sys.executable, "-c", PROGRAM, quantization]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(run.stdout)


def without_packed(home: Path, folder: Path) -> None:
    """A cache that shares all of `home` but the packed weights."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for part in home.iterdir():
        if part.name != "packed":
            (folder / part.name).symlink_to(part)


def with_goal(name: str, values: list[float], goal: float) -> Row:
    found = row(name, values, "s")
    found.goal, found.ok = goal, found.value < goal
    return found


def main() -> int:
    from specserve.models.demo import fetch_demo
    from specserve.models.home import home

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quantization", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    arguments = parser.parse_args()
    fetch_demo()
    found: dict[tuple[str, str], list[float]] = {}
    with Progress() as progress, tempfile.TemporaryDirectory() as scratch:
        task = progress.add_task("", total=arguments.repeats * len(arguments.quantization) * len(GOALS))
        for quantization in arguments.quantization:
            first_token(quantization, home())  # fills the cache
            for _ in range(arguments.repeats):
                for kind in GOALS:
                    place = home()
                    if kind == "uncached":
                        without_packed(home(), place := Path(scratch) / "home")
                    progress.update(task, advance=1, description=f"{WEIGHTS[quantization]}, {kind}")
                    found.setdefault((quantization, kind), []).append(first_token(quantization, place))
    rows = [with_goal(f"{WEIGHTS[q]}, {kind}", values, GOALS[kind]) for (q, kind), values in found.items()]
    return finish("load", rows, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
