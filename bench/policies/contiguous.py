"""Policies with contiguous reservations: Orca's iteration-level batching and FasterTransformer's static batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from bench.policies.buddy import BuddyAllocator, reservation
from bench.policies.clock import Machine
from bench.policies.outcome import Outcome, check_complete
from bench.policies.workload import Job


class Orca:
    """Iteration-level scheduling (Yu et al. 2022, section 3) over reserved regions, first come first served.

    A request starts when its whole reservation fits, computes its prompt in its first step and then one token a step;
    nothing is ever preempted. A step costs O(1): only sums are kept, and the ends lie on a heap.
    """

    def __init__(self, rule: str, machine: Machine, jobs: Sequence[Job]) -> None:
        self._rule = rule
        self._machine = machine
        self._jobs = jobs
        self._allocator = BuddyAllocator(machine.slots)
        self._ends: list[tuple[int, int, int]] = []  # (last step, number, region's start)
        self._next = 0
        self._step = 0
        # Over the running requests: KV in memory, tokens that they will have, reserved slots, regions.
        self._tokens = self._needed = self._reserved = self._held = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        clock = 0.0
        jobs = self._jobs
        while self._next < len(jobs) or self._ends:
            if not self._ends:
                clock = max(clock, jobs[self._next].arrival)
            decodes = len(self._ends)
            rows = decodes + self._admit(clock)
            self._tokens += rows
            seconds = self._machine.seconds(rows, self._tokens)
            if self._next < len(jobs) and jobs[self._next].arrival <= clock:  # somebody has to wait
                self._observe(seconds)
            clock += seconds
            self._end(clock)
            self._step += 1
        if self._tokens or self._needed or self._reserved or self._held:
            raise RuntimeError("reservations are left over")
        return check_complete(self.outcome, jobs)

    def _admit(self, clock: float) -> int:
        """Start waiting requests in order while the next one fits. Returns the rows of their prompts."""
        machine = self._machine
        rows = 0
        while self._next < len(self._jobs) and len(self._ends) < machine.max_running:
            job = self._jobs[self._next]
            if job.arrival > clock or (rows and len(self._ends) + rows + job.prompt > machine.max_rows):
                break
            slots = reservation(self._rule, job.prompt, job.output, machine.max_tokens)
            start = self._allocator.allocate(slots)
            if start is None:
                if not self._ends:
                    raise RuntimeError(f"a reservation of {slots} slots never fits {machine.slots}")
                break
            heapq.heappush(self._ends, (self._step + job.output - 1, self._next, start))
            rows += job.prompt
            self._needed += job.tokens
            self._reserved += slots
            self._held += self._allocator.held[start]
            self._next += 1
        return rows

    def _end(self, clock: float) -> None:
        while self._ends and self._ends[0][0] == self._step:
            _, number, start = heapq.heappop(self._ends)
            job = self._jobs[number]
            slots = reservation(self._rule, job.prompt, job.output, self._machine.max_tokens)
            self._tokens -= job.tokens - 1  # the last token's KV is never computed
            self._needed -= job.tokens
            self._reserved -= slots
            self._held -= self._allocator.held[start]
            self._allocator.free(start)
            self.outcome.ended(job, clock)

    def _observe(self, seconds: float) -> None:
        self.outcome.memory.add(
            seconds,
            len(self._ends),
            self._tokens,
            self._needed - self._tokens,
            self._reserved - self._needed,
            self._held,
        )


def static_batches(machine: Machine, jobs: Sequence[Job]) -> Outcome:
    """Batches as in FasterTransformer behind a dynamic batcher (Kwon et al. 2023, section 6.1).

    When the machine is free it takes the earliest requests that have arrived, at most as many as fit with the model's
    whole context reserved for each; prompts are padded to the longest, and all stay until the longest output ends.
    """
    size = machine.slots // machine.max_tokens
    if size < 1:
        raise ValueError(f"{machine.slots} slots hold no request of {machine.max_tokens} tokens")
    outcome = Outcome()
    clock = 0.0
    first = 0
    while first < len(jobs):
        clock = max(clock, jobs[first].arrival)
        batch = [job for job in jobs[first : first + size] if job.arrival <= clock]
        prompts = np.array([job.prompt for job in batch])
        outputs = np.array([job.output for job in batch])
        steps = np.arange(int(outputs.max()))
        context = len(batch) * (int(prompts.max()) + steps)
        rows = np.where(steps == 0, len(batch) * int(prompts.max()), len(batch))
        seconds = machine.base + machine.per_row * rows + machine.per_context * context
        behind = first + len(batch)
        if behind < len(jobs) and jobs[behind].arrival <= clock:
            live = steps[:, None] < outputs
            tokens = (prompts + steps[:, None]) * live
            held = len(batch) * machine.max_tokens
            reserved = ((prompts + outputs) * live - tokens).sum(axis=1)
            for i, step in enumerate(seconds):
                inner = held - int(tokens[i].sum()) - int(reserved[i])
                outcome.memory.add(float(step), len(batch), int(tokens[i].sum()), int(reserved[i]), inner, held)
        clock += float(seconds.sum())
        for job in batch:
            outcome.ended(job, clock)
        first = behind
    return check_complete(outcome, jobs)
