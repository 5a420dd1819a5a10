"""Memory on huge pages: zeros, aligned, taken when touched and given back with the last view."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from specserve.kernels.cpu import memory
from specserve.kernels.cpu.memory import HUGE_PAGE, huge, huge_zeros, populate

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


def resident(tensor: torch.Tensor) -> int:
    """Bytes of whole pages of a tensor that are in memory; its mapping may be one with a neighbour's."""
    first, pages = tensor.data_ptr() // mmap.PAGESIZE, tensor.nbytes // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = torch.frombuffer(bytearray(file.read(8 * pages)), dtype=torch.int64)
    return int((entries < 0).sum()) * mmap.PAGESIZE  # the highest bit


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_zeros_of_that_size_on_a_whole_page(nbytes: int) -> None:
    tensor = huge(nbytes)
    assert tensor.shape == (nbytes,)
    assert tensor.dtype == torch.uint8
    assert nbytes == 0 or tensor.data_ptr() % HUGE_PAGE == 0
    assert not tensor.any()
    tensor.fill_(7)
    assert bool((tensor == 7).all())


def test_shape_and_dtype() -> None:
    tensor = huge_zeros((2, 3, 5), torch.bfloat16)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((2, 3, 5), torch.bfloat16, True)
    assert huge_zeros((0, 3), torch.float32).shape == (0, 3)


@linux
def test_pages_are_asked_for_and_untouched_until_written() -> None:
    tensor = huge(64 * HUGE_PAGE)
    assert resident(tensor) == 0, "reading its address takes no memory"
    tensor[0] = 1
    assert 0 < resident(tensor) <= HUGE_PAGE
    lines = smaps(tensor.data_ptr())
    if hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in lines["VmFlags"].split()


@linux
def test_freed_with_the_last_view() -> None:
    tensor = huge(64 * HUGE_PAGE)
    address, view = tensor.data_ptr(), tensor.view(torch.float32)[5:]
    tensor[: 4 * HUGE_PAGE] = 1
    del tensor
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
    tensor = huge(64 * HUGE_PAGE)
    tensor[5], tensor[-1] = 7, 9
    part = tensor[3 * HUGE_PAGE + 100 : 40 * HUGE_PAGE + 300]
    before = int(smaps(tensor.data_ptr())["Rss"].split()[0])
    if populate(part) == 0:
        pytest.skip("this kernel cannot")
    assert int(smaps(tensor.data_ptr())["Rss"].split()[0]) - before >= 36 * HUGE_PAGE // 1024
    assert populate(tensor) == tensor.nbytes
    assert int(smaps(tensor.data_ptr())["Rss"].split()[0]) * 1024 >= tensor.nbytes
    assert (int(tensor[5]), int(tensor[-1]), int(tensor.sum())) == (7, 9, 16)
    assert populate(huge(0)) == 0


def test_where_the_platform_cannot_populate_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 12345)
    assert populate(huge(HUGE_PAGE)) == 0
