"""What the kernels' tests share."""

from __future__ import annotations

import pytest

from specserve.kernels.cpu.build import BuildError
from specserve.kernels.cpu.isa import runnable
from specserve.kernels.cpu.native import use_library


@pytest.fixture(scope="module", params=[variant.name for variant in runnable()] or [None])
def native_variants(request):
    """The tests of a module that uses this run once for every instruction set of this machine; gives its name.

    library() is the one in question. A module, not a test, is what it surrounds: hypothesis runs one test many times.
    All tests of the module must use it then (pytestmark = pytest.mark.usefixtures("native_variants")).
    """
    if request.param is None:
        pytest.skip("this machine has no instruction set that the native kernels are compiled for")
    try:
        with use_library(request.param):
            yield request.param
    except BuildError as error:
        pytest.skip(f"cannot be compiled here: {error}")
