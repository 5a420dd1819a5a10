"""The heap of an engine process: what is collapsed, and that nothing changes by it."""

import gc
import mmap
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from specserve.engine import child, heap

MAPS = """\
10000000-10a00000 rw-p 00000000 00:00 0                                  [heap]
7f0000100000-7f0000700000 rw-p 00000000 00:00 0
7f0001000000-7f0001600000 r--p 00000000 00:00 0
7f0002000000-7f0002600000 rw-s 00000000 00:00 0
7f0003000000-7f0003600000 rw-p 00000000 08:01 1234                       /usr/lib/libx.so
7f0004000000-7f0004100000 rw-p 00000000 00:00 0
7f0005000000-7f0005600000 rw-p 00000000 00:00 0                          [stack]
7f0006000000-7f0016000000 rw-p 00000000 00:00 0
""".splitlines()


def test_only_private_anonymous_memory_that_is_neither_small_nor_weights():
    assert heap.heap_regions(MAPS) == [(0x10000000, 0x10A00000), (0x7F0000200000, 0x7F0000600000)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pagemap is Linux's")
def test_pages_that_are_hardly_touched_are_left_alone():
    memory = mmap.mmap(-1, 8 * heap.HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    address = heap.ctypes.addressof(heap.ctypes.c_char.from_buffer(memory))
    first = -address % heap.HUGE_PAGE
    view[first : first + 4096] = bytes(4096)
    used = first + 2 * heap.HUGE_PAGE
    view[used : used + heap.HUGE_PAGE] = b"x" * heap.HUGE_PAGE
    begin = address + first
    assert list(heap.used_pages([(begin, begin + 4 * heap.HUGE_PAGE)])) == [begin + 2 * heap.HUGE_PAGE]


def test_no_more_than_the_limit_is_moved_and_no_contents_change(monkeypatch):
    monkeypatch.setattr(heap, "MOST", heap.HUGE_PAGE)
    kept = [bytes([i % 256]) * 1000 for i in range(10_000)]
    assert heap.collapse() in (0, heap.HUGE_PAGE)
    assert all(item == bytes([i % 256]) * 1000 for i, item in enumerate(kept))


def test_other_platforms_are_left_alone(monkeypatch):
    monkeypatch.setattr(heap.sys, "platform", "darwin")
    assert heap.collapse() == 0


def test_frozen_objects_are_out_of_the_collector():
    before = gc.get_freeze_count()
    try:
        heap.freeze()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a platform without idle threads")
def test_memory_is_taken_by_a_thread_that_takes_no_time_from_others(monkeypatch):
    monkeypatch.setattr(heap, "collapse", lambda: 0)
    seen = []

    class Executor:
        def populate(self):
            seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=child.settle, args=(SimpleNamespace(executor=Executor()),))
    thread.start()
    thread.join(60)
    assert seen == [os.SCHED_IDLE]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_the_collector_rests_until_the_last_has_loaded() -> None:
    assert gc.isenabled()
    with heap.uncollected():
        with pytest.raises(ValueError), heap.uncollected():
            raise ValueError
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with heap.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
