"""The same policies on a real engine: a gate in front of it admits a request when the policy's memory has room.

The engine behind a contiguous policy has ample paged memory; what the gate admits is what fits reservations in the
budget. For "paged" there is no gate: the engine's own pool has the budget. All policies share the engine's kernels and
its steps, so that they differ by memory and by when requests may start, and by nothing else. A static batch is not
padded: requests that have ended cost nothing more, which is kinder to it than FasterTransformer was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from bench.policies.buddy import BuddyAllocator, reservation
from bench.policies.clock import Machine, Measured, fit
from bench.policies.outcome import Outcome, check_complete
from bench.policies.workload import Job
from specserve import LLM, SamplingParams
from specserve.core.messages import DeltaEvent

BUDGET = 12 * 2**30 // (800 * 1024)  # slots of the paper's first server, before they are scaled


def demo_machine(divisor: int, parts: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Machine:
    """The demo model with budget and context `divisor` times smaller than the paper's first server."""
    blocks = BUDGET // divisor // 16
    return Machine("demo model", *parts, slots=blocks * 16, max_tokens=2048 // divisor, max_rows=512)


def open_engine(blocks: int | None = None, threads: int | None = None) -> LLM:
    """The demo model without drafts and prefix cache, on so many KV blocks of 16 tokens; None for plenty."""
    plenty = 2**28
    options = {"speculation": None, "prefix_cache": False, "block_size": 16, "threads": threads}
    llm = LLM("demo", kv_memory=plenty, **options)  # type: ignore[arg-type]
    if blocks is None:
        return llm
    block_bytes = plenty // llm.stats().kv_blocks
    llm.close()
    llm = LLM("demo", kv_memory=blocks * block_bytes, **options)  # type: ignore[arg-type]
    if llm.stats().kv_blocks != blocks:
        raise RuntimeError(f"asked for {blocks} KV blocks, the engine has {llm.stats().kv_blocks}")
    return llm


def prompt_ids(job: Job, number: int) -> list[int]:
    """Token ids that mean nothing; every request has its own."""
    return [int(i) for i in np.random.default_rng(number).integers(1000, 40_000, job.prompt)]


def measure_steps(llm: LLM, tick: Callable[[], None]) -> list[Measured]:
    """Runs of several shapes, for `clock.fit`: requests at once, prompt and output tokens."""
    shapes = [(1, 16, 24), (8, 16, 24), (32, 16, 24), (4, 200, 24), (24, 100, 24), (2, 16, 24)]
    runs = []
    for requests, prompt, output in shapes:
        job = Job(0.0, prompt, output)
        prompts = [prompt_ids(job, i) for i in range(requests)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        llm.generate(prompts, params)  # warms up
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        chunks = -(-requests * prompt // 512)
        context = requests * sum(range(prompt, prompt + output))
        runs.append(Measured(chunks + output - 1, requests * (prompt + output - 1), context, seconds))
        tick()
    return runs


def fitted_machine(llm: LLM, divisor: int, tick: Callable[[], None]) -> Machine:
    return demo_machine(divisor, fit(measure_steps(llm, tick)))


class Gate:
    """Runs a backlog through an engine under one policy. Outcome as in the simulator; the clock is the wall's."""

    def __init__(self, llm: LLM, policy: str, machine: Machine, jobs: Sequence[Job]) -> None:
        self._llm = llm
        self._policy = policy
        self._machine = machine
        self._jobs = jobs
        self._allocator = BuddyAllocator(machine.slots)
        self._freed = asyncio.Event()
        self._tokens: dict[int, int] = {}  # KV tokens of each request that has begun and not ended
        self._slots: dict[int, int] = {}  # what each admitted request reserves
        self._waiting = len(jobs)
        self._start = self._last = 0.0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        self._start = self._last = time.perf_counter()
        if self._policy == "static":
            size = self._machine.slots // self._machine.max_tokens
            for first in range(0, len(self._jobs), size):
                await self._static(range(first, min(first + size, len(self._jobs))))
        elif self._policy == "paged":
            await asyncio.gather(*(self._answer(i) for i in range(len(self._jobs))))
        else:
            await self._orca(self._policy.removeprefix("orca "))
        return check_complete(self.outcome, self._jobs)

    async def _static(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._slots[number] = self._machine.max_tokens
        self._waiting -= len(numbers)
        await asyncio.gather(*(self._answer(i) for i in numbers))
        for number in numbers:
            del self._slots[number]

    async def _orca(self, rule: str) -> None:
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(self._jobs):
                slots = reservation(rule, job.prompt, job.output, self._machine.max_tokens)
                while (region := self._allocator.allocate(slots)) is None:
                    self._freed.clear()
                    await self._freed.wait()
                self._slots[number] = slots
                self._waiting -= 1
                group.create_task(self._reserved(number, region))

    async def _reserved(self, number: int, region: int) -> None:
        await self._answer(number)
        del self._slots[number]
        self._allocator.free(region)
        self._freed.set()

    async def _answer(self, number: int) -> None:
        job = self._jobs[number]
        params = SamplingParams(max_tokens=job.output, ignore_eos=True)
        async for event in self._llm.stream(prompt_ids(job, number), params):
            if isinstance(event, DeltaEvent):
                self._observe()
                self._tokens[number] = self._tokens.get(number, job.prompt - 1) + len(event.token_ids)
        self._observe()
        del self._tokens[number]
        self.outcome.ended(job, self._last - self._start)

    def _observe(self) -> None:
        """Account for the time since the last event with what was in memory until now."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self._policy == "paged":
            self._observe_paged(seconds)
        elif self._waiting:
            tokens = sum(self._tokens.values())
            needed = sum(self._jobs[i].tokens for i in self._slots if self._policy != "static" or i in self._tokens)
            reserved = sum(self._slots.values())
            held = self._allocator.num_held if self._policy != "static" else reserved
            self.outcome.memory.add(
                seconds, len(self._slots), tokens, max(needed - tokens, 0), max(reserved - needed, 0), held
            )

    def _observe_paged(self, seconds: float) -> None:
        """What the engine says it holds. Preemption takes the latest first, so the earliest are those that run."""
        stats = self._llm.stats()
        if not stats.waiting:
            return
        held = stats.kv_blocks_used * self._machine.block_size
        running = sorted(self._tokens)[: stats.running]
        tokens = min(sum(self._tokens[i] for i in running), held)
        self.outcome.memory.add(seconds, stats.running, tokens, 0, held - tokens, held)
