"""The memory managers of the PagedAttention paper side by side, in the engine's simulator and on the demo model.

Contiguous reservation as in Orca (Max, Pow2, Oracle), static batches as in FasterTransformer, and this project's
paged memory with continuous batching (Kwon et al. 2023). Simulated figures are on a virtual clock, so that the load of
this machine does not matter; the paged ones come from the real scheduler and KV manager. Figures of the demo model are
measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.common import RESULTS
from bench.policies.clock import a100_13b
from bench.policies.explain import explain
from bench.policies.report import Report
from bench.policies.sections import FULL, LIMIT, QUICK, Simulations

SEED = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short traces: a look, not a result")
    parser.add_argument("--no-real", action="store_true", help="simulated figures only")
    parser.add_argument("--requests", type=int, default=64, help="of a run on the demo model")
    parser.add_argument("--repeats", type=int, default=5, help="of each run on the demo model")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    arguments = parser.parse_args()
    report = Report()
    machine = a100_13b()
    with Progress() as progress, ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        task = progress.add_task("simulating", total=None)

        def tick(text: str) -> None:
            progress.update(task, advance=1, description=text)

        size = QUICK if arguments.quick else FULL
        simulations = Simulations(report, machine, size, arguments.seed, pool, tick)
        progress.update(task, total=simulations.num_parts)
        simulations.run()
    explain(report, machine, LIMIT)
    if not arguments.no_real:
        measure_real(report, arguments.requests, arguments.repeats, arguments.seed)
    from bench.policies.plot import draw

    shares = {p: o.memory.shares(machine.slots) for p, o in simulations.outcomes["ShareGPT"].items()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    draw(RESULTS / "kv_policies.png", simulations.curves, shares, LIMIT)
    return report.finish("kv_policies", check=arguments.check)


def measure_real(report: Report, requests: int, repeats: int, seed: int) -> None:
    # Imported here: torch and the engine, which the simulation does without.
    from bench.policies.real_sections import real_policies, real_sharing, real_steps

    with Progress() as progress:
        task = progress.add_task("demo model", total=real_steps(repeats))

        def tick(text: str) -> None:
            progress.update(task, advance=1, description=text)

        real_policies(report, requests, repeats, seed, tick)
        real_sharing(report, seed, tick)


if __name__ == "__main__":
    raise SystemExit(main())
