"""What the bench says: figures beside the paper's, orderings that must hold, and why figures deviate."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from bench.common import RESULTS, Row, finish
from bench.policies.paper import Range


class Report:
    """Collects rows and notes, then prints them and writes bench/results/<name>.json."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._paper: dict[str, str] = {}

    def add(
        self,
        name: str,
        value: float | Sequence[float],
        unit: str,
        paper: float | Range | None = None,
        *,
        goal: float | None = None,
    ) -> None:
        """One figure, or the repeats of one. `ok` is whether it reaches `goal`.

        The row's baseline is the paper's figure; of a range, its point nearest to ours, so that a ratio of 1 is within.
        """
        values = list(value) if isinstance(value, Sequence) else [value]
        middle = statistics.median(values)
        spread = (max(values) - min(values)) / 2 / middle if len(values) > 1 and middle else None
        base = paper
        if isinstance(paper, tuple):
            base = min(max(middle, paper[0]), paper[1])
        assert base is None or isinstance(base, float | int)
        ratio = middle / base if base else None
        ok = None if goal is None else middle >= goal
        self.rows.append(Row(name, middle, unit, base, ratio, goal, ok, spread))
        self._paper[name] = _text(paper)

    def ordering(self, name: str, values: Mapping[str, float], order: Sequence[str]) -> None:
        """That `values` fall strictly along `order`. The figure is the smallest ratio between neighbours."""
        pairs = pairwise(order)
        smallest = min(values[a] / values[b] for a, b in pairs)
        row = Row(f"{name}: {' > '.join(order)}", smallest, "x at least", goal=1.0, ok=smallest > 1.0)
        self.rows.append(row)
        self._paper[row.name] = "same order"

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self, name: str, *, check: bool) -> int:
        """Table, notes, file; the exit status (1 only with `check` and a missed goal)."""
        # The file and the status are those of every bench; the table has a column more than theirs.
        with contextlib.redirect_stdout(io.StringIO()):
            status = finish(name, self.rows, check=check)
        path = RESULTS / f"{name}.json"
        body = json.loads(path.read_text())
        path.write_text(json.dumps({**body, "notes": self.notes}, indent=1) + "\n")
        console = Console()
        console.print(self._table())
        for text in self.notes:
            console.print(f"- {text}", highlight=False)
        return status

    def _table(self) -> Table:
        table = Table("what", "ours", "unit", "paper", "goal", "ok", "spread")
        for r in self.rows:
            ok = "" if r.ok is None else ("yes" if r.ok else "NO")
            spread = "" if r.spread is None else f"{r.spread:.1%}"
            goal = "" if r.goal is None else f"{r.goal:g}"
            table.add_row(r.name, f"{r.value:.2f}", r.unit, self._paper[r.name], goal, ok, spread)
        return table


def _text(paper: float | Range | None) -> str:
    if paper is None:
        return ""
    if isinstance(paper, tuple):
        low, high = paper
        if low == 0:
            return f"up to {high:g}"
        return f"{low:g}" if low == high else f"{low:g} - {high:g}"
    return f"{paper:g}"
