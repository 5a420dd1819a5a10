"""Progress of fetching and loading, shown in a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class ConsoleProgress:
    """A `progress(done, total, what)` callback that draws one bar for each `what` on stderr.

    Used as a context manager. Where stderr is no terminal it prints one line as each `what` begins. A total of 0 is
    for what is only told.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ConsoleProgress:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bars away; idempotent."""
        self._bars.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
            if not self._console.is_terminal:
                size = f" ({total / 1e6:.0f} MB)" if total else ""
                self._console.print(what + size, highlight=False)
        self._bars.update(self._tasks[what], completed=done, total=total)
