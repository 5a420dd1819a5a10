"""Progress where stderr is no terminal: a line for each thing, not a bar torn over lines."""

from __future__ import annotations

import io

from rich.console import Console

from specserve.models.progress import ConsoleProgress


def test_one_line_for_each_thing_outside_a_terminal() -> None:
    out = io.StringIO()
    with ConsoleProgress(Console(file=out, force_terminal=False)) as progress:
        for done in range(0, 4_000_001, 1_000_000):
            progress(done, 4_000_000, "weights")
        progress(1, 2_000_000, "tokenizer")
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert lines[:2] == ["weights (4 MB)", "tokenizer (2 MB)"]


def test_bars_in_a_terminal_show_what_is_done() -> None:
    out = io.StringIO()
    with ConsoleProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        progress(3_000_000, 4_000_000, "weights")
        progress(4_000_000, 4_000_000, "weights")
    assert "weights" in out.getvalue()
