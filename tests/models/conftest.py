"""What the tests of the native forward share with the kernels'."""

from __future__ import annotations

import pytest

from tests.kernels.conftest import every_variant as every_variant
from tests.kernels.conftest import native_variants as native_variants


@pytest.fixture(scope="module")
def native_library(native_variants):
    """The tests of a module that uses this run once for every instruction set, and not at all where there is none."""
    if native_variants is None:
        pytest.skip("there is no native library")
    return native_variants


@pytest.fixture(scope="module")
def every_library(every_variant):
    """The same, with no instruction set left to the slow tests."""
    if every_variant is None:
        pytest.skip("there is no native library")
    return every_variant
