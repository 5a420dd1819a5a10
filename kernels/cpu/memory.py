"""Anonymous memory on huge pages: a core that streams through it misses the TLB 512 times less often."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import numpy as np
import numpy.typing as npt

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

HUGE_PAGE = 2 << 20  # bytes
LINE = 64  # bytes
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_AT_A_TIME = HUGE_PAGE  # bytes of one call: others who map memory wait for it, and it may be done by an idle thread
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def huge(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory uint8 [nbytes], on 2 MB pages where the platform has them, else on its usual ones.

    A page takes memory once it is touched, not before. The memory is freed with the last array or tensor that views it.

    Raises:
        OSError: the address space is exhausted.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    # The last page ends in this mapping, so that no neighbour shares it and the kernel may make it a huge one.
    pages = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, pages + HUGE_PAGE, **_PRIVATE)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):  # less would take more than was asked for
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)  # keeps the mapping alive
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + nbytes]


def populate(memory: npt.NDArray[np.uint8]) -> int:
    """Take all pages of memory now, which its first writes would do otherwise; what is in it stays.

    The interpreter lock is free meanwhile, and others may read and write there. Does nothing where the platform does
    not know of it.

    Returns:
        Bytes that were taken by it or before it.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = memory.ctypes.data
    first, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + memory.nbytes
    for at in range(first, end, _AT_A_TIME):
        if madvise(at, min(_AT_A_TIME, end - at), _POPULATE_WRITE) != 0:
            return max(0, at - begin)
    return memory.nbytes


def empty(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """float32 of a shape, not initialised, that begins on a line of the caches."""
    nbytes = 4 * math.prod(shape)
    whole = np.empty(nbytes + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + nbytes].view(np.float32).reshape(shape)
