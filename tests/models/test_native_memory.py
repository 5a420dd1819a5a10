"""A step of the native forward allocates nothing once the first ones of its size are done."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.kernels.cpu.build import BuildError, sanitised
from specserve.kernels.cpu.isa import runnable
from specserve.kernels.cpu.native import open_library

SHIM = r"""
#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static std::atomic<bool> counts;
static std::atomic<long> count;

static void note() {
    if (counts) count++;
}
void* malloc(size_t n) { return note(), __libc_malloc(n); }
void* calloc(size_t n, size_t size) { return note(), __libc_calloc(n, size); }
void* realloc(void* p, size_t n) { return note(), __libc_realloc(p, n); }
void* memalign(size_t to, size_t n) { return note(), __libc_memalign(to, n); }
void* aligned_alloc(size_t to, size_t n) { return note(), __libc_memalign(to, n); }
int posix_memalign(void** p, size_t to, size_t n) {
    note();
    return (*p = __libc_memalign(to, n)) ? 0 : ENOMEM;
}
// Allocations of all threads while call(a, b) runs.
long count_allocations(void (*call)(const void*, const void*), const void* a, const void* b) {
    count = 0, counts = true;
    call(a, b);
    counts = false;
    return count;
}
long count_one() {  // of a call that does allocate
    return count_allocations([](const void*, const void*) { operator delete(operator new(100)); }, nullptr, nullptr);
}
}
"""
STEPS = r"""
import ctypes, sys

import torch

from specserve.kernels.cpu.native import use_library
from tests.fakes.paging import Paged
from tests.models.native_models import SHAPES, model, tokens

shim = ctypes.CDLL(sys.argv[1])
shim.count_allocations.argtypes, shim.count_allocations.restype = (ctypes.c_void_p,) * 3, ctypes.c_long
assert shim.count_one() == 1
counts = []


class Counting:
    def __init__(self, lib):
        self.lib = lib

    def __getattr__(self, name):
        return getattr(self.lib, name)

    def ss_forward(self, model, step):
        counts.append(shim.count_allocations(ctypes.cast(self.lib.ss_forward, ctypes.c_void_p), model, step))


def steps(shape, kind):
    paged = Paged(model(shape, kind))
    paged.model._forward._lib = Counting(paged.model._forward._lib)
    ids, blocks = tokens(200, SHAPES[shape].vocab_size), [paged.blocks(200) for _ in range(4)]
    for _ in range(3):
        paged.forward([(ids[:128], 0, blocks[0])], "last")
        for position in range(128, 160):
            paged.forward([(ids[position : position + 1], position, line) for line in blocks])


torch.set_num_threads(2)
for isa in sys.argv[2:]:
    with use_library(isa):
        for shape, kind in (("odd", "mixed"), ("dim48", "q4_1")):
            counts.clear()
            steps(shape, kind)
            print(isa, shape, *counts)
"""
# Attention on tiles makes a list of its rows in every call.
KNOWN = ("amx", "odd")


def libraries() -> list[str]:
    """The instruction sets that there is a library for."""
    names = []
    for variant in runnable():
        with contextlib.suppress(BuildError):
            open_library(variant.name)
            names.append(variant.name)
    return names


@pytest.mark.skipif(sanitised(), reason="the sanitiser brings its own allocator")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="allocations are counted by the loader's means")
def test_a_step_allocates_nothing(tmp_path: Path) -> None:
    compiler, names = shutil.which("g++") or shutil.which("c++"), libraries()
    if compiler is None or not names:
        pytest.skip("no C++ compiler, or no native library")
    source, shim = tmp_path / "shim.cpp", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-O1", "-std=c++17", "-shared", "-fPIC", source, "-o", shim], check=True, timeout=300)
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(shim), *names],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(names)
    for isa, shape, *counts in lines:
        assert len(counts) == 3 * 33
        # Threads have memory of their own that is made when each first needs it, which may be late.
        few = sum(count != "0" for count in counts) <= 8
        assert few or (isa, shape) == KNOWN, (isa, shape, counts)
