"""The pool of threads: every piece is computed once, whoever calls and however many threads there are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from specserve.kernels.cpu.linear import PackedLinear
from specserve.kernels.cpu.native import library

ROOT = Path(__file__).resolve().parents[2]
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
MANY = 9

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not to be had here")
needs_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are pinned on Linux")


def layer() -> tuple[PackedLinear, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return PackedLinear(torch.randn(700, 64, generator=random)), torch.randn(40, 64, generator=random)


@pytest.fixture(autouse=True)
def threads():
    """More threads than there are CPUs, as their races are what is tested."""
    before = torch.get_num_threads()
    library().ss_limit_threads(MANY)
    yield torch.set_num_threads
    library().ss_limit_threads(0)
    torch.set_num_threads(before)


def count(total: int, piece: int, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each of 0..total was claimed, and how often each participant was called."""
    counts, calls = torch.zeros(total, dtype=torch.int64), torch.zeros(max(threads, 1), dtype=torch.int64)
    library().ss_count_claims(counts.data_ptr(), calls.data_ptr(), total, piece, threads)
    return counts, calls


def test_number_of_threads_changes_no_bit(threads):
    linear, x = layer()
    threads(1)
    expected = linear(x)
    for number in (2, 3, MANY):
        threads(number)
        for _ in range(50):
            assert torch.equal(linear(x), expected)


def test_callers_at_once(threads):
    linear, x = layer()
    threads(2)
    expected = linear(x)
    wrong: list[int] = []

    def call(number: int) -> None:
        torch.set_num_threads(2)
        for rows in [1 + (number * 7 + i) % 40 for i in range(200)]:
            if not torch.equal(linear(x[:rows]), expected[:rows]):
                wrong.append(rows)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("total", [0, 1, 7, 1001])
@pytest.mark.parametrize("piece", [0, 3, 5000])
def test_every_piece_of_every_range_is_claimed_once(total, piece):
    for number in (1, 2, MANY, 1000):
        for _ in range(4):
            counts, _ = count(total, piece, number)
            assert (counts == 1).all(), (number, counts)


def test_a_slot_belongs_to_one_participant():
    met = torch.zeros(MANY, dtype=torch.int64)
    for _ in range(300):
        counts, calls = count(30_000, 100, MANY)
        assert calls[0] == 1
        assert calls.max() <= 1
        assert (counts == 1).all()
        met += calls
    assert met[1:].sum() > 0, "no helper ever came"


def test_fewer_threads_use_the_first_slots_only():
    count(30_000, 100, MANY)
    for _ in range(50):
        _, calls = count(30_000, 100, MANY - 1)
        assert calls.max() <= 1  # a ninth slot would write past the end


def test_the_call_returns_when_all_have():
    total = 300_000
    last = torch.arange(1, MANY + 1) * total // MANY - 1  # of each range: who is not waited for has not come to it
    for _ in range(200):
        counts, calls = torch.zeros(total, dtype=torch.int64), torch.zeros(MANY, dtype=torch.int64)
        library().ss_count_claims(counts.data_ptr(), calls.data_ptr(), total, total, MANY)
        assert (counts[last] == 1).all()


def python(code: str, **environment: str) -> str:
    """Print lines from a process of its own, where `run(threads)` shares work and `helpers()` maps the pool's thread
    ids to the CPUs that each may use."""
    head = """
import os, pathlib, re, sys
import torch
from specserve.kernels.cpu.native import library
buffer = torch.zeros(60_000, dtype=torch.int64)
def run(threads):
    library().ss_count_claims(buffer.data_ptr(), buffer[50_000:].data_ptr(), 50_000, 100, threads)
def helpers():
    found = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        if task.joinpath("comm").read_text().strip() == "specserve-pool":
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found
"""
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_linux
def test_no_more_threads_than_cpus():
    assert python("run(300); print(len(helpers()))") == str(CPUS - 1)
    alone = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); run(300); print(len(helpers()))"
    assert python(alone) == "0"


@needs_linux
@pytest.mark.skipif(CPUS < 2, reason="one CPU has no helper")
def test_helpers_are_pinned_to_a_cpu_each():
    code = "run(300); cpus = list(helpers().values()); print(sum(map(len, cpus)), len(set.union(*cpus)))"
    assert python(code) == f"{CPUS - 1} {CPUS - 1}"
    free = python(code, SPECSERVE_PIN="0")
    assert free == f"{(CPUS - 1) * CPUS} {CPUS}"


@needs_linux
@pytest.mark.skipif(CPUS < 2, reason="one CPU has no helper")
def test_a_helper_makes_way_for_the_caller():
    code = """
run(300)
for _ in range(3):
    taken = next(iter(helpers().values()))
    os.sched_setaffinity(0, taken)
    while taken in helpers().values():
        run(300)
print("moved")
"""
    assert python(code) == "moved"
