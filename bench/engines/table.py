"""Rates -> rows with goals: ours against the better of the peers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from bench.common import Row, row
from bench.engines.work import Work

OURS = "specserve"


def rows(work: Work, precision: str, rates: Mapping[str, Sequence[float]], missing: Mapping[str, str]) -> list[Row]:
    """Rows of one workload in one precision.

    Args:
        rates: engine -> tokens a second of its repeats.
        missing: engine -> why it has none.
    """
    peers = {name: values for name, values in rates.items() if name != OURS and values}
    base = better(peers)
    made = []
    if rates.get(OURS):
        baseline = peers[base] if base else None
        title = f"{_title(work, precision)}: {OURS}"
        made.append(row(title, rates[OURS], "tokens/s", baseline=baseline, goal_ratio=work.goal(precision)))
    made += [row(f"{_title(work, precision)}: {name}", values, "tokens/s") for name, values in peers.items()]
    made += [Row(f"{_title(work, precision)}: {name} not measured: {why}", 0.0, "") for name, why in missing.items()]
    return made


def better(peers: Mapping[str, Sequence[float]]) -> str | None:
    """The peer with the highest median; None where there is none."""
    return max(peers, key=lambda name: statistics.median(peers[name]), default=None)


def agreement(tokens: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Peer -> how many tokens it began with as we did: whether it runs the same weights, rounding aside."""
    ours = tokens.get(OURS)
    if ours is None:
        return {}
    return {name: _common(ours, theirs) for name, theirs in tokens.items() if name != OURS}


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _title(work: Work, precision: str) -> str:
    return f"{precision}, {work.name}"
