"""What the kernels' tests share."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from specserve.kernels.cpu.build import BuildError
from specserve.kernels.cpu.isa import runnable
from specserve.kernels.cpu.native import open_library, use_library

NAMES = [variant.name for variant in runnable()]
WANTED = [name for name in NAMES if name == os.environ.get("SPECSERVE_ISA", name)]


# The best one, which is the last, always; the others are slow where a module does not say that it wants them all.
BEST = [name if name == WANTED[-1] else pytest.param(name, marks=pytest.mark.slow) for name in WANTED]


@pytest.fixture(scope="module", params=BEST or [None])
def native_variants(request):
    """The tests of a module that uses this run once for every instruction set of this machine; gives its name. With
    SPECSERVE_ISA, for that one only. All but the best one are slow tests.

    library() is the one in question. A module, not a test, is what it surrounds: hypothesis runs one test many times.
    All tests of the module must use it then (pytestmark = pytest.mark.usefixtures("native_variants")).
    """
    yield from _use(request.param)


@pytest.fixture(scope="module", params=WANTED or [None])
def every_variant(request):
    """The same, and none of them is slow."""
    yield from _use(request.param)


def _use(name):
    try:
        if name is not None:
            open_library(name)
    except BuildError as error:
        if name != NAMES[-1]:
            pytest.skip(f"cannot be compiled here: {error}")
        yield None  # once all the same: much of the tests is about the reference
        return
    with use_library(name) if name else nullcontext():
        yield name
