"""The bench's sections on the demo model: the policies by gating, and sharing by parallel samples and beams."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from functools import partial

from bench.policies import paper
from bench.policies.outcome import PARTS
from bench.policies.real import Gate, fitted_machine, open_engine
from bench.policies.real_sharing import KINDS, NotShared, beam_overhead, measured_saving
from bench.policies.report import Report
from bench.policies.sections import FALLING, WIDTHS
from bench.policies.simulator import POLICIES, simulate
from bench.policies.workload import ALPACA, SHAREGPT, backlog

DIVISOR = 8  # lengths, context and budget against the paper's, so that a run takes seconds
FIT_RUNS = 6
SHARING_JOBS = 6
BEAMS, BEAM_TOKENS = 4, 48
PROMPTS = (16, 64, 256, 1024)  # what the beams share grows


def real_steps(repeats: int) -> int:
    """How often `real_policies` and `real_sharing` call `tick` when nothing is skipped."""
    return FIT_RUNS + repeats * len(POLICIES) + len(KINDS) * len(WIDTHS) * SHARING_JOBS + len(PROMPTS)


def real_policies(report: Report, requests: int, repeats: int, seed: int, tick: Callable[[str], None]) -> None:
    """A backlog through every policy in turn, `repeats` times, and what the simulator says of the same backlog."""
    jobs = backlog(SHAREGPT.scaled(DIVISOR), requests, seed)
    plenty = open_engine()
    machine = fitted_machine(plenty, DIVISOR, lambda: tick("timing steps of the demo model"))
    limited = open_engine(machine.slots // machine.block_size)
    limited.generate([[1, 2, 3]])  # warms up, as the timed steps did with the other engine
    rates: dict[str, list[float]] = {p: [] for p in POLICIES}
    tokens: dict[str, list[float]] = {p: [] for p in POLICIES}
    try:
        for _ in range(repeats):
            for policy in POLICIES:
                tick(f"demo model, {policy}")
                llm = limited if policy == "paged" else plenty
                outcome = asyncio.run(Gate(llm, policy, machine, jobs).run())
                rates[policy].append(outcome.throughput)
                tokens[policy].append(outcome.memory.shares(machine.slots)[PARTS[0]])
    finally:
        plenty.close()
        limited.close()
    for policy in FALLING:
        expected = simulate(policy, machine, jobs)
        report.add(f"demo model, throughput, {policy}", rates[policy], "tokens/s")
        report.add(f"demo model, throughput, {policy}, simulated", expected.throughput, "tokens/s")
        report.add(f"demo model, KV memory, {policy}: token states", [100 * v for v in tokens[policy]], "%")
    middle = {p: statistics.median(v) for p, v in rates.items()}
    report.add("demo model, throughput, continuous over static", middle["paged"] / middle["static"], "x", (0.0, 24.0))
    report.ordering("demo model, throughput", middle, FALLING)
    report.ordering(
        "demo model, token states in the KV memory", {p: statistics.median(v) for p, v in tokens.items()}, FALLING
    )
    report.note(
        f"Demo model: {requests} requests with ShareGPT's lengths / {DIVISOR}, {machine.slots} slots of KV, context "
        f"{machine.max_tokens}. A step takes {1e3 * machine.base:.1f} ms, {1e6 * machine.per_row:.0f} us a row and "
        f"{1e6 * machine.per_context:.2f} us a token of KV read (fitted): rows cost much beside the fixed part, so a "
        "larger batch gains less than on a GPU that waits for its weights, and factors are smaller than the paper's. A "
        "static batch is not padded here, and a prompt counts as token states from its first output token on."
    )


def real_sharing(report: Report, seed: int, tick: Callable[[str], None]) -> None:
    """Memory saved by parallel samples and beams of the demo model, with Alpaca's lengths."""
    jobs = backlog(ALPACA, SHARING_JOBS, seed)
    llm = open_engine()
    try:
        for kind in KINDS:
            for width in WIDTHS:
                try:
                    saved = measured_saving(llm, kind, width, jobs, partial(tick, f"demo model, {kind} of {width}"))
                except NotShared as reason:
                    report.note(f"Demo model, memory saved: skipped, {reason}.")
                    break
                known = paper.SAVED["Alpaca"][kind][width]
                report.add(f"demo model, Alpaca lengths, memory saved, {kind} of {width}", 100 * saved, "%", known)
        extra = {}
        for prompt in PROMPTS:
            tick(f"demo model, beam search of {BEAMS} after {prompt} tokens")
            extra[f"{prompt} prompt tokens"] = 100 * beam_overhead(llm, BEAMS, prompt, BEAM_TOKENS)
        for name, value in extra.items():
            report.add(f"demo model, beam search of {BEAMS}, extra KV over greedy, {name}", value, "%")
        report.ordering(f"demo model, extra KV of {BEAMS} beams over greedy", extra, list(extra))
    finally:
        llm.close()
