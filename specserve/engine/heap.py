"""The engine process's own memory, settled once the engine is built: what lives as long as the process is collected no
more and lies on huge pages.

A forward streams through all weights, so that nothing else is in the caches when it ends: the step around it then meets
each object anew, and on 4 kB pages the page tables that lead to it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

HUGE_PAGE = 2 << 20  # bytes
MOST = 256 << 20  # bytes moved to huge pages: several times what an engine's objects and libraries' heaps take
MOST_REGION = 64 << 20  # bytes of one mapping: larger ones are weights and KV, which see to their pages themselves
_ADVICE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE; MADV_COLLAPSE, from Linux 6.1 on
_PAGE = 4096
_RESIDENT = 1 << 63  # a pagemap entry's bit
_LEAST = 0.25  # share of a huge page that must be in use already: the rest of it becomes resident
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")


_lock = threading.Lock()
_holds = 0  # how many `uncollected` are under way
_resumes = False  # whether the collector runs again behind the last of them


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile, in the whole process: of what is imported and loaded nothing is garbage, and
    the collector would walk through it again and again. It goes on behind the last of several, if it ran before.
    """
    global _holds, _resumes
    with _lock:
        if _holds == 0:
            _resumes = gc.isenabled()
            gc.disable()
        _holds += 1
    try:
        yield
    finally:
        with _lock:
            _holds -= 1
            if _holds == 0 and _resumes:
                gc.enable()


def freeze() -> None:
    """Whatever is there now is no matter for the collector any more: a full collection would walk through all of it,
    in the middle of a step.
    """
    gc.collect()
    gc.freeze()


def collapse() -> int:
    """Move the heap in use to huge pages: of the whole process, hence for processes of our own alone.

    Takes a while, for which the interpreter lock is free and the rest of the process goes on, slower. Does
    nothing where the platform does not know of it.

    Returns:
        Bytes that are on huge pages by it or before it.
    """
    if not sys.platform.startswith("linux"):
        return 0
    moved = 0
    with contextlib.suppress(OSError, AttributeError, ValueError):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for begin in used_pages(heap_regions(Path("/proc/self/maps").read_text().splitlines())):
            if moved >= MOST:
                break
            madvise(begin, HUGE_PAGE, _ADVICE)
            if madvise(begin, HUGE_PAGE, _COLLAPSE) == 0:
                moved += HUGE_PAGE
    return moved


def heap_regions(maps: Iterable[str]) -> list[tuple[int, int]]:
    """(begin, end) of what huge pages may hold: the whole 2 MB pages of private anonymous writable mappings.

    Args:
        maps: lines of /proc/self/maps.
    """
    regions = []
    for line in maps:
        found = _MAPPING.match(line)
        if found is None or found[3] != "rw-p" or found[4] != "0" or found[5] not in ("", "[heap]"):
            continue
        begin, end = int(found[1], 16), int(found[2], 16)
        if found[5] == "" and end - begin > MOST_REGION:
            continue
        begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if begin < end:
            regions.append((begin, end))
    return regions


def used_pages(regions: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Addresses of the 2 MB pages in them of which enough is resident."""
    small = HUGE_PAGE // _PAGE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        for begin, end in regions:
            for page in range(begin, end, HUGE_PAGE):
                file.seek(page // _PAGE * 8)
                entries = memoryview(file.read(small * 8)).cast("Q")
                if sum(entry >= _RESIDENT for entry in entries) >= _LEAST * small:
                    yield page
