"""What one step of the scheduler costs: seconds of schedule() + commit() per running request, no model and no torch.

256 requests run over a pool of 100,000 blocks. Each scenario is set up afresh for each repeat; the figure of a repeat
is the median over its steps, the row's value the median over repeats. Drafts and results are made outside of the
timed part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.common import Row, finish
from bench.policies.paged import new_request
from specserve.core.plan import SampledTokens, StepPlan, StepResult
from specserve.core.request import Request
from specserve.core.tree import TokenTree
from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from specserve.sched.scheduler import Scheduler, SchedulerLimits

RUNNING = 256
BLOCKS = 100_000
BLOCK_SIZE = 16
GOAL = 8.0  # microseconds a running request and step
DRAFT = TokenTree.chain([11, 12, 13, 14], "suffix")
ACCEPTED = 2
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the steps are made of.

    Attributes:
        drafts: every decoding request has a draft of 4 tokens, of which 2 are accepted.
        prefill: one of the running requests computes chunks of a long prompt all the time.
        prefix_cache: full blocks are hashed and published as they fill.
    """

    name: str
    drafts: bool = False
    prefill: bool = False
    prefix_cache: bool = False


SCENARIOS = (
    Scenario("decode only"),
    Scenario("decode, prefix cache", prefix_cache=True),
    Scenario("drafts of 4", drafts=True),
    Scenario("decode and a prompt's chunk", prefill=True),
    Scenario("drafts of 4, a prompt's chunk, prefix cache", drafts=True, prefill=True, prefix_cache=True),
)


class Load:
    """256 running requests, all past their prompts but the one of `prefill`."""

    def __init__(self, scenario: Scenario, steps: int) -> None:
        self._scenario = scenario
        per_request = 1 + (len(DRAFT) if scenario.drafts else 0)
        rows = RUNNING * per_request + 2 * CHUNK
        self.kv = KVManager(BlockPool(BLOCKS, BLOCK_SIZE), prefix_cache=scenario.prefix_cache)
        self.scheduler = Scheduler(SchedulerLimits(max_batched_tokens=rows, max_running=RUNNING), self.kv)
        decoding = RUNNING - scenario.prefill
        for number in range(decoding):
            # Lengths differ, so that requests cross the edges of blocks at different steps.
            prompt = [number] * (200 + 7 * number % 400)
            self.scheduler.add(new_request(f"r{number}", prompt, 4096, number))
        while len(self.decoding()) < decoding:
            self.step()
        if scenario.prefill:
            # The chunk takes whatever rows are left, so the prompt is as long as all the steps can want.
            prompt = list(range((steps + 20) * rows))
            self.scheduler.add(new_request("long", prompt, 8, RUNNING))

    def decoding(self) -> list[Request]:
        return [r for r in self.scheduler.running if r.ready_to_draft]

    def step(self) -> tuple[float, StepPlan]:
        """One step. Returns the seconds of schedule() and commit(), and the plan."""
        if self._scenario.drafts:
            for request in self.scheduler.running:
                if request.ready_to_draft:
                    request.draft = DRAFT
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter() - start
        if plan is None:
            raise RuntimeError("nothing is planned")
        result = StepResult(
            plan.step, tuple([self._output(r.request_id, r.epoch, r.num_logits) for r in plan.requests])
        )
        start = time.perf_counter()
        self.scheduler.commit(plan, result)
        return scheduled + time.perf_counter() - start, plan

    def _output(self, request_id: str, epoch: int, num_logits: int) -> SampledTokens:
        if not num_logits:
            return SampledTokens(request_id, epoch)
        accepted = min(ACCEPTED, num_logits - 1)
        return SampledTokens(request_id, epoch, (11, 12, 13)[: accepted + 1], num_logits - 1, accepted)


def measure(scenario: Scenario, steps: int, tick: Callable[[], None]) -> float:
    """Microseconds a running request and step: the median over `steps` steps."""
    load = Load(scenario, steps)
    seconds = []
    for i in range(steps + 10):
        taken, plan = load.step()
        assert len(load.scheduler.running) == RUNNING
        if i >= 10:  # the first ones warm up
            assert len(plan.requests) == RUNNING
            assert (plan.num_rows > RUNNING) == (scenario.drafts or scenario.prefill)
            seconds.append(taken)
        tick()
    return statistics.median(seconds) / RUNNING * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    arguments = parser.parse_args()
    values: dict[str, list[float]] = {s.name: [] for s in SCENARIOS}
    with Progress() as progress:
        task = progress.add_task("", total=arguments.repeats * len(SCENARIOS) * (arguments.steps + 10))
        for _ in range(arguments.repeats):
            for scenario in SCENARIOS:
                progress.update(task, description=scenario.name)
                values[scenario.name].append(measure(scenario, arguments.steps, lambda: progress.advance(task)))
    assert "torch" not in sys.modules, "scheduler and KV manager do without torch"
    rows = []
    for name, found in values.items():
        value = statistics.median(found)
        spread = (max(found) - min(found)) / 2 / value
        rows.append(Row(name, value, "us a running request", goal=GOAL, ok=value <= GOAL, spread=spread))
    return finish("scheduler", rows, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
