"""One trace through one policy on a virtual clock, and the highest rate of arrivals that a policy sustains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.policies.clock import Machine
from bench.policies.contiguous import Orca, static_batches
from bench.policies.outcome import Outcome
from bench.policies.paged import Paged
from bench.policies.workload import Job, Workload, backlog, poisson

STRIDE = 1.3
CURVE = (0.25, 0.5, 0.7, 0.85)  # rates below the highest one that a curve has too
POLICIES = ("static", "orca max", "orca pow2", "orca oracle", "paged")


def simulate(
    policy: str, machine: Machine, jobs: Sequence[Job], *, prefix: int = 0, prefix_cache: bool = False
) -> Outcome:
    """Run `jobs` (in order of arrival) to their end. `prefix` and `prefix_cache` are for "paged" alone."""
    if policy == "paged":
        return Paged(machine, jobs, prefix=prefix, prefix_cache=prefix_cache).run()
    if policy == "static":
        return static_batches(machine, jobs)
    if policy in POLICIES:
        return Orca(policy.removeprefix("orca "), machine, jobs).run()
    raise ValueError(f"policy {policy!r} must be one of {', '.join(POLICIES)}")


@dataclass(slots=True)
class Curve:
    """Normalised latency at the rates that were tried.

    Attributes:
        points: requests a second -> mean seconds per output token.
        rate: the highest rate at which the latency is within the limit.
    """

    points: dict[float, float] = field(default_factory=dict)
    rate: float = 0.0


def highest_rate(latency_at: Callable[[float], float], limit: float, start: float, *, tolerance: float = 0.02) -> Curve:
    """Bisection for the rate at which the latency reaches `limit`; latency grows with the rate.

    Args:
        start: where the search begins; moved by STRIDE until the limit lies between two rates.
        tolerance: relative width at which the search ends.
    """
    curve = Curve()

    def fits(rate: float) -> bool:
        curve.points[rate] = latency_at(rate)
        return curve.points[rate] <= limit

    low = high = start
    if fits(start):
        while fits(high := high * STRIDE):
            low = high
    else:
        while not fits(low := low / STRIDE):
            high = low
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        if fits(middle):
            low = middle
        else:
            high = middle
    curve.rate = low
    return curve


@dataclass(frozen=True, slots=True)
class Search:
    """One search for a highest rate; plain data, so that it can be sent to another process.

    Attributes:
        seconds: length of the trace's arrivals.
        limit: seconds per output token.
        start: first rate tried.
        curve: whether rates well below the highest one are run too, for a picture.
    """

    policy: str
    machine: Machine
    workload: Workload
    seconds: float
    limit: float
    start: float
    seed: int
    prefix_cache: bool = False
    curve: bool = False

    def run(self) -> Curve:
        def latency_at(rate: float) -> float:
            jobs = poisson(self.workload, rate, self.seconds, self.seed)
            prefix = self.workload.prefix
            outcome = simulate(self.policy, self.machine, jobs, prefix=prefix, prefix_cache=self.prefix_cache)
            return outcome.normalised_latency

        curve = highest_rate(latency_at, self.limit, self.start)
        if self.curve:
            curve.points.update((rate, latency_at(rate)) for rate in (share * curve.rate for share in CURVE))
        return curve


@dataclass(frozen=True, slots=True)
class Backlog:
    """`count` requests at once through one policy; plain data, as Search is."""

    policy: str
    machine: Machine
    workload: Workload
    count: int
    seed: int

    def run(self) -> Outcome:
        return simulate(self.policy, self.machine, backlog(self.workload, self.count, self.seed))
