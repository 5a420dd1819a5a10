"""Prometheus text of the engine's stats. Counter names may carry labels: `name{source="suffix"}`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specserve.core.messages import EngineStats

PREFIX = "specserve:"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


def render(stats: EngineStats, server: dict[str, float]) -> str:
    """One line a sample, one TYPE line a metric; names that end in _total are counters.

    What the server says itself goes before the engine's word: readiness and engine_stalled never differ.
    """
    values: dict[str, float] = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_blocks": stats.kv_blocks,
        "kv_blocks_used": stats.kv_blocks_used,
        "draft_kv_blocks": stats.draft_kv_blocks,
        "draft_kv_blocks_used": stats.draft_kv_blocks_used,
        "num_requests_swapped": stats.swapped,
        "host_kv_blocks": stats.host_kv_blocks,
        "host_kv_blocks_used": stats.host_kv_blocks_used,
        "kv_cache_usage_ratio": stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0,
        **stats.counters,
        **server,
    }
    return "\n".join(_lines(values)) + "\n"


def _lines(values: dict[str, float]) -> Iterable[str]:
    families: dict[str, list[str]] = {}
    for name, value in values.items():
        base, brace, labels = name.partition("{")
        base = base.removeprefix(PREFIX)
        if _NAME.match(base):
            families.setdefault(base, []).append(f"{PREFIX}{base}{brace}{labels} {_number(value)}")
    for base, samples in families.items():
        yield f"# TYPE {PREFIX}{base} {'counter' if base.endswith('_total') else 'gauge'}"
        yield from samples


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
