"""How OpenMP's threads wait for each other. Must run before torch, which brings OpenMP, is imported."""

from __future__ import annotations

import os

# Turns of the spin loop before a thread sleeps. By default it spins for good, and a step of hundreds of short parallel
# sections then needs all its threads on a core at the same time: with one busy process beside it, it ran five times
# slower here. So few turns bridge the gaps within a step and no more.
SPIN_COUNT = 300


def bound_spinning() -> None:
    """Bound the spinning of this process's OpenMP threads, unless the user has set how they wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
