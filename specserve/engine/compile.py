"""Grammars are compiled in a few threads of their own: neither the engine's loop nor an event loop waits for one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from specserve.core.errors import GrammarError, OverloadedError
from specserve.core.protocols import Matcher


class Grammar(Protocol):
    def matcher(self) -> Matcher:
        """A new state at the grammar's beginning."""


class Compiler(Protocol):
    def compile(self, guided: Mapping[str, Any]) -> Grammar:
        """Blocking; raises GrammarError."""


@dataclass(slots=True)
class _Job:
    guided: Mapping[str, Any]
    submitted: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    outcome: Matcher | Exception | None = None


class CompilePool:
    """Compiles for requests and keeps the outcomes until they are fetched.

    Args:
        compiler: its `compile` is called from several threads.
        threads: so many compilations run at once.
        limit: so many requests may wait here; more are refused.
        timeout: seconds after which a request stops waiting (its thread is left to the compiler's own limits).
    """

    def __init__(
        self,
        compiler: Compiler,
        *,
        threads: int = 2,
        limit: int = 1024,
        timeout: float = 60.0,
    ) -> None:
        self._compiler = compiler
        self._limit = limit
        self._timeout = timeout
        self._jobs: dict[str, _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # Daemons: a compiler that hangs must not keep the process alive.
        self._threads = [threading.Thread(target=self._work, name="grammar", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, request_id: str, guided: Mapping[str, Any]) -> None:
        """Start a compilation.

        Raises:
            OverloadedError: too many wait already.
        """
        if len(self._jobs) >= self._limit:
            raise OverloadedError(f"{self._limit} grammars wait to be compiled; try again later")
        job = self._jobs[request_id] = _Job(guided)
        self._queue.put(job)

    def cancel(self, request_id: str) -> None:
        """Forget a request; a compilation that did not start yet never does."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.cancelled = True

    def ready(self) -> list[tuple[str, Matcher | Exception]]:
        """Outcomes since the last call, in the order in which the requests came."""
        now = time.monotonic()
        done: list[tuple[str, Matcher | Exception]] = []
        for request_id, job in list(self._jobs.items()):
            if job.outcome is None and now - job.submitted > self._timeout:
                job.cancelled = True
                job.outcome = GrammarError(f"the grammar was not compiled within {self._timeout:g} s", param="guided")
            if job.outcome is not None:
                del self._jobs[request_id]
                done.append((request_id, job.outcome))
        return done

    def close(self) -> None:
        """End the threads; one that is busy ends with its compilation."""
        for job in self._jobs.values():
            job.cancelled = True
        self._jobs.clear()
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.cancelled:
                continue
            try:
                job.outcome = self._compiler.compile(job.guided).matcher()
            except Exception as error:  # any fault is this request's alone
                job.outcome = error
