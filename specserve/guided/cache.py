"""What was compiled before: programs by size in bytes, failures by count, both least recently used first out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from specserve.core.errors import GrammarError


class Sized(Protocol):
    """Anything that knows its size."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held now; may grow."""


T = TypeVar("T", bound=Sized)


class GrammarCache(Generic[T]):
    """Thread-safe. One key is made once at a time: later callers wait for the first.

    Args:
        max_bytes: of all kept programs together; a larger one is handed out but not kept.
        max_failures: failures kept.
    """

    def __init__(self, max_bytes: int, max_failures: int = 1024) -> None:
        self.max_bytes = max_bytes
        self.max_failures = max_failures
        self.bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._sizes: dict[str, int] = {}  # bytes of each program when it was last asked for
        self._failures: OrderedDict[str, GrammarError] = OrderedDict()
        self._pending: dict[str, Future[T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def failures(self) -> int:
        """Failures kept."""
        return len(self._failures)

    def get(self, key: str, make: Callable[[], T], wait_seconds: float) -> T:
        """The program of `key`, made by `make` if it is not there.

        Raises:
            GrammarError: from `make`, now or earlier. One with the code "grammar_busy" is not kept.
        """
        with self._lock:
            if key in self._kept:
                program = self._kept.pop(key)
                self.bytes -= self._sizes.pop(key)
                self._keep(key, program)
                return program
            if key in self._failures:
                self._failures.move_to_end(key)
                raise _copy(self._failures[key])
            pending = self._pending.get(key)
            if pending is None:
                mine: Future[T] = Future()
                self._pending[key] = mine
        if pending is not None:
            try:
                return pending.result(timeout=wait_seconds)
            except TimeoutError:
                raise GrammarError("guided: the same grammar is still being compiled", code="grammar_busy") from None
            except GrammarError as error:
                raise _copy(error) from None
        return self._make(key, make, mine)

    def _make(self, key: str, make: Callable[[], T], future: Future[T]) -> T:
        try:
            program = make()
        except BaseException as error:
            with self._lock:
                del self._pending[key]
                if isinstance(error, GrammarError) and error.code != "grammar_busy":
                    self._failures[key] = _copy(error)
                    if len(self._failures) > self.max_failures:
                        self._failures.popitem(last=False)
            future.set_exception(error)
            raise
        with self._lock:
            del self._pending[key]
            self._keep(key, program)
        future.set_result(program)
        return program

    def _keep(self, key: str, program: T) -> None:
        """Add as the most recently used, at its size of now."""
        size = program.memory_bytes
        if size > self.max_bytes:
            return
        self._kept[key] = program
        self._sizes[key] = size
        self.bytes += size
        while self.bytes > self.max_bytes:
            gone, _ = self._kept.popitem(last=False)
            self.bytes -= self._sizes.pop(gone)

    def check(self) -> None:
        """Assert the invariants."""
        with self._lock:
            assert self._kept.keys() == self._sizes.keys()
            assert self.bytes == sum(self._sizes.values()) <= self.max_bytes
            assert len(self._failures) <= self.max_failures


def _copy(error: GrammarError) -> GrammarError:
    """A fresh exception: a raised one would keep its traceback, and with it the frames, alive."""
    return GrammarError(error.message, param=error.param, code=error.code)
