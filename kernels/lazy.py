"""torch, imported when it is first used; and how many threads work, which has to be known before.

Importing torch takes longer than loading a model for the native forward, which does without it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

P = ParamSpec("P")
R = TypeVar("R")


class _Torch(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who asks what kind of module this is does not use torch
            raise AttributeError(name)
        return getattr(load(), name)


torch = _Torch("torch")


class _Threads(threading.local):
    """Of each thread that computes, as in OpenMP, which torch uses: several engines may be in one process."""

    count: int | None = None  # what torch has not been told of


_threads = _Threads()


def load() -> Any:
    """The real torch, with the number of threads that was set in this thread."""
    import torch as real

    if _threads.count is not None:
        count, _threads.count = _threads.count, None
        real.set_num_threads(count)
    return real


def loaded() -> bool:
    """Whether torch is imported, or is being imported."""
    return "torch" in sys.modules


def set_num_threads(count: int) -> None:
    """For the calling thread: of the native kernels and, once it is imported, of torch's operations."""
    _threads.count = count
    if loaded():
        load()


def num_threads() -> int:
    """What was set last in this thread, here or by torch's own function; else torch's default, or all of the CPUs."""
    if _threads.count is not None:
        return _threads.count
    return int(load().get_num_threads()) if loaded() else cores()


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def inference(function: Callable[P, R]) -> Callable[P, R]:
    """torch.inference_mode() around each call, without importing torch where the function is defined."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with load().inference_mode():
            return function(*args, **kwargs)

    return wrapped
