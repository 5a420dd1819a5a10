"""The bench's sections: each runs one experiment and puts its figures beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from bench.policies import paper
from bench.policies.clock import Machine
from bench.policies.outcome import PARTS, Outcome
from bench.policies.report import Report
from bench.policies.sharing import SHARING
from bench.policies.simulator import POLICIES, Backlog, Curve, Search
from bench.policies.workload import ALPACA, SHAREGPT, TRANSLATION, Workload

LIMIT = 0.5  # seconds a token at which rates are compared
WIDTHS = (2, 4, 6)
FALLING = tuple(reversed(POLICIES))  # the paper's order in everything that should be high
RESERVING = ("orca oracle", "orca pow2", "orca max")
# Where each search begins (requests a second): near its end, so that little is run for nothing.
STARTS = {
    "ShareGPT": dict(zip(POLICIES, (0.25, 0.8, 1.1, 1.3, 2.4), strict=True)),
    "Alpaca": dict(zip(POLICIES, (1.7, 4.6, 24.0, 32.0, 46.0), strict=True)),
}
PREFIX_STARTS = {80: {"paged": 58.0, "orca oracle": 25.0}, 341: {"paged": 44.0, "orca oracle": 9.5}}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated: requests of a backlog, seconds of arrivals, requests that share."""

    backlog: dict[str, int]
    seconds: dict[str, float]
    sharing: int


FULL = Size({"ShareGPT": 1500, "Alpaca": 6000}, {"ShareGPT": 1200.0, "Alpaca": 400.0, "translation": 200.0}, 600)
QUICK = Size({"ShareGPT": 300, "Alpaca": 1500}, {"ShareGPT": 300.0, "Alpaca": 100.0, "translation": 60.0}, 100)


class Simulations:
    """Runs the simulated sections in other processes; `tick` is called as parts of them end.

    Attributes:
        outcomes: workload -> policy -> Outcome of a backlog.
        curves: workload -> policy -> Curve.
    """

    def __init__(
        self, report: Report, machine: Machine, size: Size, seed: int, pool: Executor, tick: Callable[[str], None]
    ) -> None:
        self._report = report
        self._machine = machine
        self._tick = tick
        self.outcomes: dict[str, dict[str, Outcome]] = {}
        self.curves: dict[str, dict[str, Curve]] = {}
        # Everything is handed out at once, what takes longest first, so that no core waits for another.
        self._searches = {
            (s.workload.name, s.policy, s.workload.prefix): pool.submit(s.run) for s in self._plan(size, seed)
        }
        self._sharing = {
            (w.name, kind, width): pool.submit(share, w, size.sharing, width, seed)
            for w in (SHAREGPT, ALPACA)
            for kind, share in SHARING.items()
            for width in WIDTHS
        }
        self._backlogs = {
            (w.name, p): pool.submit(Backlog(p, machine, w, size.backlog[w.name], seed).run)
            for w in (SHAREGPT, ALPACA)
            for p in POLICIES
        }

    def _plan(self, size: Size, seed: int) -> Iterator[Search]:
        for workload in (SHAREGPT, ALPACA):
            for policy in FALLING:
                seconds, start = size.seconds[workload.name], STARTS[workload.name][policy]
                yield Search(policy, self._machine, workload, seconds, LIMIT, start, seed, curve=True)
        seconds = size.seconds[TRANSLATION.name]
        for prefix, starts in PREFIX_STARTS.items():
            workload = replace(TRANSLATION, prefix=prefix)
            for policy, start in starts.items():
                cached = policy == "paged"
                yield Search(policy, self._machine, workload, seconds, LIMIT, start, seed, prefix_cache=cached)

    @property
    def num_parts(self) -> int:
        """How often `run` calls `tick`."""
        return len(self._searches) + len(self._sharing) + len(self._backlogs)

    def run(self) -> None:
        for workload in (SHAREGPT, ALPACA):
            self.rates(workload)
        for workload in (SHAREGPT, ALPACA):
            self.backlogs(workload)
        self.memory()
        self.batches()
        self.throughput()
        for workload in (ALPACA, SHAREGPT):
            self.sharing(workload)
        self.prefixes()

    def _found(self, workload: Workload, policy: str) -> Curve:
        curve = self._searches[workload.name, policy, workload.prefix].result()
        self._tick(f"rates, {workload.name}, {policy}")
        return curve

    def backlogs(self, workload: Workload) -> None:
        self.outcomes[workload.name] = {}
        for policy in POLICIES:
            self.outcomes[workload.name][policy] = self._backlogs[workload.name, policy].result()
            self._tick(f"backlog, {workload.name}, {policy}")

    def memory(self) -> None:
        """Figure 2: what the memory holds while requests wait."""
        found = self.outcomes["ShareGPT"]
        report = self._report
        for policy in RESERVING:
            shares = found[policy].memory.shares(self._machine.slots)
            for part, known in zip(PARTS, paper.MEMORY[policy], strict=True):
                report.add(f"ShareGPT, KV memory, {policy}: {part}", 100 * shares[part], "%", known)
        of_blocks = 100 * found["paged"].memory.of_allocated
        known = paper.MEMORY["paged"][0]
        report.add("ShareGPT, allocated blocks, paged: token states", of_blocks, "%", known, goal=known)
        shares = found["paged"].memory.shares(self._machine.slots)
        for part in (PARTS[0], *PARTS[2:]):
            report.add(f"ShareGPT, KV memory, paged: {part}", 100 * shares[part], "%")
        tokens = {p: o.memory.shares(self._machine.slots)[PARTS[0]] for p, o in found.items()}
        report.ordering("ShareGPT, token states in the KV memory", tokens, FALLING)

    def batches(self) -> None:
        """Figure 13: requests batched, here while requests wait."""
        for name, found in self.outcomes.items():
            values = {p: o.memory.batch for p, o in found.items()}
            for policy in FALLING:
                self._report.add(
                    f"{name}, requests batched, {policy}", values[policy], "", paper.BATCHED[name].get(policy)
                )
            self._report.ordering(f"{name}, requests batched", values, FALLING[:-1])

    def rates(self, workload: Workload) -> None:
        """Figure 12: the highest rate at equal normalised latency."""
        name = workload.name
        self.curves[name] = {}
        for policy in FALLING:
            curve = self.curves[name][policy] = self._found(workload, policy)
            self._report.add(f"{name}, highest rate, {policy}", curve.rate, "requests/s")
        rates = {p: c.rate for p, c in self.curves[name].items()}
        for policy in (*RESERVING, "static"):
            known = paper.RATE[name].get(policy)
            self._report.add(f"{name}, highest rate, paged over {policy}", rates["paged"] / rates[policy], "x", known)
        self._report.ordering(f"{name}, highest rate", rates, FALLING)

    def throughput(self) -> None:
        """Output tokens a second through a backlog: continuous against static batching."""
        for name, found in self.outcomes.items():
            rates = {p: o.throughput for p, o in found.items()}
            for policy in FALLING:
                self._report.add(f"{name}, throughput of a backlog, {policy}", rates[policy], "tokens/s")
            over = rates["paged"] / rates["static"]
            self._report.add(f"{name}, throughput, continuous over static", over, "x", (0.0, paper.CLAIM))
            self._report.ordering(f"{name}, throughput", rates, FALLING)

    def sharing(self, workload: Workload) -> None:
        """Figure 15: memory saved by sharing."""
        name = workload.name
        saved: dict[str, dict[int, float]] = {}
        for kind in SHARING:
            saved[kind] = {}
            for width in WIDTHS:
                value = saved[kind][width] = self._sharing[name, kind, width].result()
                known = paper.SAVED[name][kind].get(width)
                self._report.add(f"{name}, memory saved, {kind} of {width}", 100 * value, "%", known)
                self._tick(f"sharing, {name}, {kind} of {width}")
        for kind, values in saved.items():
            widths = {f"{w} sequences": value for w, value in values.items()}
            self._report.ordering(f"{name}, memory saved, {kind}", widths, list(reversed(widths)))
        for width in WIDTHS:
            pair = {kind: values[width] for kind, values in saved.items()}
            order = ["beam search", "parallel sampling"]
            self._report.ordering(f"{name}, memory saved, {width} sequences", pair, order)

    def prefixes(self) -> None:
        """Figure 16: throughput with a shared prefix, as the highest rate at equal normalised latency."""
        gains = {}
        for prefix in PREFIX_STARTS:
            workload = replace(TRANSLATION, prefix=prefix)
            oracle = self._found(workload, "orca oracle")
            paged = self._found(workload, "paged")
            examples = "5-shot" if prefix == 341 else "1-shot"
            gains[examples] = paged.rate / oracle.rate
            self._report.add(f"{examples} prefix, highest rate, orca oracle", oracle.rate, "requests/s")
            self._report.add(f"{examples} prefix, highest rate, paged", paged.rate, "requests/s")
            self._report.add(
                f"{examples} prefix, paged over orca oracle", gains[examples], "x", paper.PREFIX[prefix], goal=1.0
            )
        self._report.ordering("gain of a shared prefix", gains, ["5-shot", "1-shot"])
