"""What a run gives: latencies, throughput, and what the KV memory held, averaged over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.policies.workload import Job

PARTS = ("token states", "reservation", "internal fragmentation", "external fragmentation and others")


@dataclass(slots=True)
class Memory:
    """Integrals over time of what the KV memory held, in slots times seconds.

    The names are those of Kwon et al. 2023, section 3.1 and figure 2. What is in no region or block counts as external
    fragmentation and others, and so does a buddy allocator's rounding: the paper's figure 2 shows no internal
    fragmentation for a system that reserves the exact length.

    Attributes:
        seconds: how long was observed.
        tokens: slots that hold the KV of a token.
        reserved: slots that a token will still take.
        internal: slots taken that no token ever fills: reserved beyond the true length, the rest of a last block.
        allocated: all of the regions or blocks that are given out.
        requests: running requests times seconds.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    allocated: float = 0.0
    requests: float = 0.0

    def add(
        self, seconds: float, requests: float, tokens: float, reserved: float, internal: float, allocated: float
    ) -> None:
        """Observe one step of `seconds`; slots as they are at its end."""
        self.seconds += seconds
        self.requests += seconds * requests
        self.tokens += seconds * tokens
        self.reserved += seconds * reserved
        self.internal += seconds * internal
        self.allocated += seconds * allocated

    @property
    def batch(self) -> float:
        """Requests that ran at once, on average."""
        return self.requests / self.seconds if self.seconds else 0.0

    @property
    def of_allocated(self) -> float:
        """Share of the allocated slots that holds token states, 0 .. 1."""
        return self.tokens / self.allocated if self.allocated else 0.0

    def shares(self, slots: int) -> dict[str, float]:
        """Shares of the whole KV memory of `slots`, in PARTS' order; they add up to 1."""
        whole = slots * self.seconds or 1.0
        known = [self.tokens / whole, self.reserved / whole, self.internal / whole]
        return dict(zip(PARTS, [*known, 1 - sum(known)], strict=True))


@dataclass(slots=True)
class Outcome:
    """One run of one policy.

    Attributes:
        memory: over the steps in which requests waited, so that memory or places were what limits.
        latencies: seconds from arrival to the end a request, in order of completion, and its output tokens.
        makespan: seconds until the last request ended.
        preemptions: how often a request gave its memory up.
    """

    memory: Memory = field(default_factory=Memory)
    latencies: list[tuple[float, int]] = field(default_factory=list)
    makespan: float = 0.0
    preemptions: int = 0

    def ended(self, job: Job, at: float) -> None:
        self.latencies.append((at - job.arrival, job.output))
        self.makespan = max(self.makespan, at)

    @property
    def normalised_latency(self) -> float:
        """Mean over requests of end-to-end seconds per output token (Kwon et al. 2023, section 6.1)."""
        return sum(seconds / output for seconds, output in self.latencies) / len(self.latencies)

    @property
    def throughput(self) -> float:
        """Output tokens a second over the whole run."""
        return sum(output for _, output in self.latencies) / self.makespan

    @property
    def requests_per_second(self) -> float:
        return len(self.latencies) / self.makespan


def check_complete(outcome: Outcome, jobs: Sequence[Job]) -> Outcome:
    """Every request ended once.

    Raises:
        RuntimeError: otherwise; a policy lost or doubled a request.
    """
    if sorted(output for _, output in outcome.latencies) != sorted(job.output for job in jobs):
        raise RuntimeError(f"{len(jobs)} requests arrived, {len(outcome.latencies)} ended")
    return outcome
