"""Preemption: the latest request gives its KV up (Kwon et al. 2023, section 4.5): to host memory, or to be recomputed.

What it published stays in the prefix cache until it is evicted, so that recomputing is often cheap. All of a request
or nothing: the beams of one search go together, as none can go on without the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.request import Request, Status
from specserve.kv.manager import KVManager, SequenceKV

MODES = ("auto", "swap", "recompute")


def victim(running: Sequence[Request], beneficiary: Request) -> Request | None:
    """The last of `running` (in serving order) if it comes after `beneficiary` and its beams, else None.

    Only later requests give way, so the first request always advances and nobody starves.
    """
    last = running[-1]
    same = last.family is not None and last.family.in_step and last.family is beneficiary.family
    return None if same or last is beneficiary else last


def together(request: Request) -> list[Request]:
    """The running requests that give way with this one: the beams of its search, or it alone."""
    family = request.family
    if family is None or not family.in_step:
        return [request]
    return [member for member in family.members if member.status is Status.RUNNING]


class Preemption:
    """Swap or recompute.

    Args:
        mode: "swap" where the host pool has room, "recompute" always, or "auto": what the measured costs say.
        seconds_per_block: of moving one block one way, as measured at start-up; None where nothing was measured.
    """

    __slots__ = ("mode", "seconds_per_block")

    def __init__(self, mode: str = "auto", seconds_per_block: float | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"{mode!r} is not one of {', '.join(MODES)}")
        self.mode = mode
        self.seconds_per_block = seconds_per_block

    def swaps(self, kv: KVManager, seqs: Sequence[SequenceKV], seconds_per_row: float | None) -> bool:
        """Whether to try the host pool.

        Args:
            seconds_per_row: measured cost of computing one known token again; None while nothing was measured.
        """
        if self.mode != "auto":
            return self.mode == "swap"
        if self.seconds_per_block is None or seconds_per_row is None:
            return False
        there_and_back = 2 * self.seconds_per_block * kv.swap_cost(seqs)
        return there_and_back < seconds_per_row * sum(map(kv.recompute_rows, seqs))

    def observe(self, num_blocks: int, seconds: float) -> None:
        """A step moved so many blocks in so many seconds. One stall must not decide for long."""
        if num_blocks <= 0 or not seconds > 0:
            return
        measured = seconds / num_blocks
        known = self.seconds_per_block
        self.seconds_per_block = measured if known is None else known + (min(measured, 4 * known) - known) / 8
