"""Paged memory with continuous batching: this project's own scheduler and KV manager, on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

from bench.policies.clock import Machine
from bench.policies.outcome import Outcome, check_complete
from bench.policies.workload import Job
from specserve.core.plan import SampledTokens, StepPlan, StepResult
from specserve.core.request import Request
from specserve.core.sampling import SamplingParams
from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from specserve.sched.scheduler import Scheduler, SchedulerLimits


def result_of(plan: StepPlan, token: int = 7) -> StepResult:
    """What a worker would return whose model says the same token always: one for each request that samples."""
    return StepResult(
        plan.step,
        tuple(SampledTokens(r.request_id, r.epoch, (token,) if r.num_logits else ()) for r in plan.requests),
    )


def new_request(name: str, tokens: list[int], output: int, arrival: int) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=output, ignore_eos=True), arrival=arrival)


class Paged:
    """The real scheduler in the loop of an engine whose forward takes as long as the machine model says.

    Strict first come, first served, as the other policies are; preemption is the scheduler's own.

    Args:
        prefix: tokens at the start of each prompt that all requests share.
        prefix_cache: whether they are computed once and shared.
    """

    def __init__(self, machine: Machine, jobs: Sequence[Job], *, prefix: int = 0, prefix_cache: bool = False) -> None:
        self._machine = machine
        self._jobs = jobs
        self._prefix = prefix
        pool = BlockPool(machine.slots // machine.block_size, machine.block_size)
        self.kv = KVManager(pool, prefix_cache=prefix_cache)
        limits = SchedulerLimits(
            max_batched_tokens=machine.max_rows,
            max_running=machine.max_running,
            max_waiting=len(jobs),
            max_model_len=machine.max_tokens,
            skip_window=0,
        )
        self.scheduler = Scheduler(limits, self.kv)
        self._next = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        clock = 0.0
        jobs = self._jobs
        scheduler = self.scheduler
        while self._next < len(jobs) or scheduler.has_work:
            self._arrive(clock)
            plan = scheduler.schedule()
            if plan is None:
                if self._next == len(jobs):
                    raise RuntimeError("the scheduler has work and plans nothing")
                clock = max(clock, jobs[self._next].arrival)
                continue
            context = sum([r.start + len(r.token_ids) for r in plan.requests])
            seconds = self._machine.seconds(plan.num_rows, context)
            clock += seconds
            advanced = scheduler.commit(plan, result_of(plan))
            if scheduler.waiting:
                self._observe(seconds)
            for request in advanced:
                if request.num_output_tokens == request.params.max_tokens:
                    scheduler.finish(request.request_id)
                    self.outcome.ended(jobs[request.arrival], clock)
        self.outcome.preemptions = scheduler.num_preemptions
        if not self.kv.baseline():
            raise RuntimeError("KV blocks are left over")
        return check_complete(self.outcome, jobs)

    def _arrive(self, clock: float) -> None:
        jobs = self._jobs
        while self._next < len(jobs) and jobs[self._next].arrival <= clock:
            number = self._next
            job = jobs[number]
            # Prompts differ from the first token after the shared prefix on.
            own = [1000 + number] * (job.prompt - self._prefix)
            self.scheduler.add(new_request(f"r{number}", [*range(self._prefix), *own], job.output, number))
            self._next += 1

    def _observe(self, seconds: float) -> None:
        """Slots at the step's commit: what lies past the committed tokens has been given back by then."""
        running = self.scheduler.running
        size = self._machine.block_size
        held = self.kv.target.num_used * size
        # Only full blocks are shared between requests, so what is free in a last block is one request's own.
        waste = sum([len(r.kv.target.block_ids) * size - r.num_computed for r in running])
        self.outcome.memory.add(seconds, len(running), held - waste, 0, waste, held)
