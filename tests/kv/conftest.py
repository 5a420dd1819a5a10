"""How many random histories are tried."""

import os

import pytest


@pytest.fixture
def examples() -> int:
    """Examples a property test runs: SPECSERVE_EXAMPLES, else 2000."""
    return int(os.environ.get("SPECSERVE_EXAMPLES", "2000"))
