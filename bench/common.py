"""What every bench shares: rows with medians and spread, the result file, the table, and --check."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("specserve", "torch", "transformers", "xgrammar", "numpy")


@dataclass(slots=True)
class Row:
    """One figure. `ok` is None where there is no goal; `ratio` is value over baseline."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    goal: float | None = None
    ok: bool | None = None
    spread: float | None = None


def row(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    baseline: Sequence[float] | None = None,
    goal_ratio: float | None = None,
    goal_at_most: float | None = None,
) -> Row:
    """Median and spread (half of max - min over the median) of repeats, against a baseline's median.

    The ratio is to reach `goal_ratio`, or to stay within `goal_at_most` where less is better.
    """
    value = statistics.median(values)
    base = statistics.median(baseline) if baseline else None
    ratio = value / base if base else None
    goal = goal_ratio if goal_at_most is None else goal_at_most
    ok = None
    if goal is not None and ratio is not None:
        ok = ratio >= goal if goal_at_most is None else ratio <= goal
    return Row(name, value, unit, base, ratio, goal, ok, (max(values) - min(values)) / 2 / value)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info: dict[str, Any] = {
        "system": platform.system(),
        "arch": platform.machine(),
        "python": platform.python_version(),
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines if ":" in line)
        fields = {key.strip(): value.strip() for key, value in found.items()}
        flags = fields.get("flags", "").split()
        info["cpu"] = fields.get("model name", "")
        info["cores"] = sum(line.startswith("processor") for line in lines)
        info["isa"] = [f for f in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if f in flags]
    return info


def finish(name: str, rows: Sequence[Row], *, check: bool = False) -> int:
    """Print the table, write bench/results/<name>.json; the exit status (1 only with --check and a missed goal)."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {p: importlib.metadata.version(p) for p in PACKAGES}
    body = {
        "machine": machine(),
        "versions": versions,
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": [asdict(r) for r in rows],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n")
    table = Table("what", "value", "unit", "baseline", "ratio", "goal", "ok", "spread")
    for r in rows:
        cells = [f"{r.value:.1f}", r.unit, _cell(r.baseline, "{:.1f}"), _cell(r.ratio, "{:.2f}")]
        cells += [_cell(r.goal, "{:.2f}"), "" if r.ok is None else ("yes" if r.ok else "NO"), _cell(r.spread, "{:.1%}")]
        table.add_row(r.name, *cells)
    Console().print(table)
    return 1 if check and any(r.ok is False for r in rows) else 0


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
