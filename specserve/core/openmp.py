"""How OpenMP's threads wait for each other. Must run before torch, which brings OpenMP, is imported."""

from __future__ import annotations

import os

# Turns of the spin loop before a thread of torch's own operations sleeps. By default it spins much longer, and short
# parallel sections then need all their threads on a core at the same time, which one busy process beside them prevents.
# (The native kernels have a pool of their own, which does not depend on this.)
SPIN_COUNT = 3000


def bound_spinning() -> None:
    """Bound the spinning of this process's OpenMP threads, unless the user has set how they wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
