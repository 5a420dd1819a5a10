"""Memory on huge pages: zeros, aligned, taken when touched and given back with the last view."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specserve.kernels.cpu import memory
from specserve.kernels.cpu.memory import HUGE_PAGE, huge, populate

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def smaps(address: int) -> dict[str, str]:
    """The lines of /proc/self/smaps on the mapping that holds an address; empty where there is none."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split(" ", 1)[0]:
            low, high = (int(x, 16) for x in line.split(" ", 1)[0].split("-"))
            inside = low <= address < high
        elif inside:
            found[name] = value.strip()
    return found


def resident(memory: npt.NDArray[np.uint8]) -> int:
    """Bytes of whole pages of memory that are in memory; its mapping may be one with a neighbour's."""
    first, pages = memory.ctypes.data // mmap.PAGESIZE, memory.nbytes // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * pages), np.int64)
    return int((entries < 0).sum()) * mmap.PAGESIZE  # the highest bit


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_zeros_of_that_size_on_a_whole_page(nbytes: int) -> None:
    array = huge(nbytes)
    assert array.shape == (nbytes,)
    assert array.dtype == np.uint8
    assert nbytes == 0 or array.ctypes.data % HUGE_PAGE == 0
    assert not array.any()
    array.fill(7)
    assert bool((array == 7).all())


@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5), (2, 49152)])
def test_floats_begin_on_a_line_of_the_caches(shape: tuple[int, ...]) -> None:
    array = memory.empty(shape)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == (shape, np.float32, True)
    assert array.size == 0 or array.ctypes.data % memory.LINE == 0
    array.fill(7)


@linux
def test_pages_are_asked_for_and_untouched_until_written() -> None:
    array = huge(64 * HUGE_PAGE)
    assert resident(array) == 0, "reading its address takes no memory"
    array[0] = 1
    assert 0 < resident(array) <= HUGE_PAGE
    lines = smaps(array.ctypes.data)
    if hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in lines["VmFlags"].split()


@linux
def test_freed_with_the_last_view() -> None:
    array = huge(64 * HUGE_PAGE)
    address, view = array.ctypes.data, torch.from_numpy(array).view(torch.float32)[5:]
    array[: 4 * HUGE_PAGE] = 1
    del array
    assert int(smaps(address)["Rss"].split()[0]) * 1024 >= 4 * HUGE_PAGE
    del view
    assert int(smaps(address).get("Rss", "0 kB").split()[0]) * 1024 < 4 * HUGE_PAGE


def test_a_platform_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    class Mapping(mmap.mmap):
        madvise = refuse

    monkeypatch.setattr(memory.mmap, "mmap", Mapping)
    assert not huge(3 * HUGE_PAGE).any()


@linux
def test_populating_takes_every_page_and_changes_nothing() -> None:
    array = huge(64 * HUGE_PAGE)
    array[5], array[-1] = 7, 9
    part = array[3 * HUGE_PAGE + 100 : 40 * HUGE_PAGE + 300]
    before = int(smaps(array.ctypes.data)["Rss"].split()[0])
    if populate(part) == 0:
        pytest.skip("this kernel cannot")
    assert int(smaps(array.ctypes.data)["Rss"].split()[0]) - before >= 36 * HUGE_PAGE // 1024
    assert populate(array) == array.nbytes
    assert int(smaps(array.ctypes.data)["Rss"].split()[0]) * 1024 >= array.nbytes
    assert (int(array[5]), int(array[-1]), int(array.sum())) == (7, 9, 16)
    assert populate(huge(0)) == 0


def test_where_the_platform_cannot_populate_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 12345)
    assert populate(huge(HUGE_PAGE)) == 0
