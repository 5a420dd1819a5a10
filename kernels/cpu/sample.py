"""Binding of sample.cpp: the tokens of a step's rows in one call."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from ctypes import CDLL, c_char_p, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from specserve.kernels.cpu.native import library
from specserve.kernels.lazy import num_threads

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

NO_TOKEN, UNDECIDED = -1, -2  # of a row without a finite entry; of one that is left to the torch path
# SampleRow of sample.cpp: what changes from step to step, then what a request keeps.
ROW = struct.Struct("=QQqQQ")  # pointers to logits and mask, the mask's words, pointer to `processed`, position
_OPTIONS = struct.Struct("=QQQQqqddfi")


def pack_options(
    seed: int,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    forbidden: npt.NDArray[np.bool_] | None = None,
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None,
) -> bytes:
    """One request's part of a row. The arrays must outlive it.

    Args:
        seed: read as 64 unsigned bits.
        temperature: 0 is greedy, for which truncation means nothing.
        forbidden: bool [V]; bias: (int64 [b] distinct ids, float32 [b]).
    """
    noisy = temperature > 0
    return _OPTIONS.pack(
        seed & (2**64 - 1),
        0 if forbidden is None else forbidden.ctypes.data,
        0 if bias is None else bias[0].ctypes.data,
        0 if bias is None else bias[1].ctypes.data,
        0 if bias is None else len(bias[0]),
        top_k if noisy else 0,
        top_p if noisy else 1.0,
        math.log(min_p) if noisy and min_p > 0 else -math.inf,
        temperature if noisy else 1.0,
        noisy,
    )


def sample_rows(parts: Sequence[bytes], count: int, vocab: int) -> list[int] | None:
    """Tokens of `count` rows, NO_TOKEN or UNDECIDED; None where there is no native library.

    Args:
        parts: of each row its ROW and its options.
    """
    functions = _functions()
    if functions is None:
        return None
    out = (c_int64 * count)()
    functions[0](b"".join(parts), out, count, vocab, num_threads())
    return out[:]


def best_rows(logits: npt.NDArray[np.float32]) -> list[int] | None:
    """Greedy tokens of float32 [r, V] with adjacent columns; None where there is no native library.

    The lowest id among equals; NO_TOKEN where the largest entry is not finite.
    """
    functions = _functions()
    if functions is None:
        return None
    rows, width = logits.shape
    out = (c_int64 * rows)()
    functions[1](logits.ctypes.data, out, rows, width, logits.strides[0] // logits.itemsize, num_threads())
    found: list[int] = out[:]
    return found


def _functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    lib = library()
    return None if lib is None else _typed(lib)


@functools.cache
def _typed(lib: CDLL) -> tuple[Callable[..., Any], Callable[..., Any]]:
    sample, best = lib.ss_sample, lib.ss_best
    sample.argtypes, sample.restype = (c_char_p, c_void_p, c_int64, c_int64, c_int), None
    best.argtypes, best.restype = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int), None
    return sample, best
