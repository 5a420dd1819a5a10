"""Binding of move.cpp: whole KV blocks from one memory to another, or within one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.kernels import kv_layout
from specserve.kernels.cpu.native import library
from specserve.kernels.lazy import num_threads

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where the KV blocks of a memory are: each is split into one piece a plane (K or V of one layer).

    Attributes:
        at: address.
        count: of blocks.
        planes, piece: number and bytes of a block's pieces.
        plane_stride, block_stride: bytes from a plane's, and a block's, piece to the next one's.
    """

    at: int
    count: int
    planes: int
    piece: int
    plane_stride: int
    block_stride: int


def move(src: Blocks, dst: Blocks, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block a of src to block b of dst for each (a, b), in order. There must be a native library.

    Raises:
        IndexError: a block is not there; nothing was copied.
    """
    kv_layout.check_pairs(pairs, src.count, dst.count)
    lib = library()
    assert lib is not None
    numbers = (ctypes.c_int64 * (2 * len(pairs)))(*(number for pair in pairs for number in pair))
    lib.ss_move_blocks(
        src.at,
        dst.at,
        ctypes.addressof(numbers),
        len(pairs),
        src.planes,
        src.piece,
        src.plane_stride,
        src.block_stride,
        dst.plane_stride,
        dst.block_stride,
        num_threads(),
    )
