"""Preemption: the latest request gives its KV up and is computed again later (Kwon et al. 2023, section 4.5).

What it published stays in the prefix cache until it is evicted, so that recomputing is often cheap.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.request import Request, Status
from specserve.kv.manager import KVManager


def victim(running: Sequence[Request], beneficiary: Request) -> Request | None:
    """The last of `running` (in serving order) if it comes after `beneficiary`, else None.

    Only later requests give way, so the first request always advances and nobody starves.
    """
    last = running[-1]
    return None if last is beneficiary else last


def give_up(request: Request, kv: KVManager) -> None:
    """Release a running request's KV for recomputation. Its pending draft is dropped, its epoch bumped."""
    kv.release(request.kv)
    request.kv = None
    request.num_computed = 0
    request.move_to(Status.PREEMPTED)
