"""SchedulerLimits, and the checks that refuse a request at the door."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.core.errors import CapacityError, InvalidRequestError
from specserve.core.request import Request, Status
from specserve.kv.manager import KVManager
from specserve.sched.family import beam_blocks


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and the queues hold at most.

    Attributes:
        max_batched_tokens: rows a step.
        max_running: requests that own KV at once.
        max_waiting: requests in the queue; more are refused as overloaded.
        max_model_len: positions of the model's context; drafts shrink to it. None for no limit.
        skip_window: waiting requests that do not fit and may be passed in one step; 0 is strict order.
        skip_patience: times that one request is passed at most before nothing overtakes it.
    """

    max_batched_tokens: int = 512
    max_running: int = 256
    max_waiting: int = 4096
    max_model_len: int | None = None
    skip_window: int = 8
    skip_patience: int = 32

    def __post_init__(self) -> None:
        if min(self.max_batched_tokens, self.max_running, self.max_waiting, self.skip_patience) < 1:
            raise ValueError(f"limits must be at least 1: {self}")

    @property
    def places(self) -> int:
        """Requests that run at once: each must get a row in every step."""
        return min(self.max_running, self.max_batched_tokens)


def check_new(request: Request, kv: KVManager, limits: SchedulerLimits) -> None:
    """Refuse a request that could never run.

    Raises:
        ValueError: its status is not that of a new request.
        InvalidRequestError: it has no tokens.
        CapacityError: prompt and max_tokens exceed the target's pool, even with nothing else in it; or its beams do, or
            there are more of them than requests may run.
    """
    if request.status not in (Status.WAITING, Status.COMPILING):
        raise ValueError(f"request {request.request_id} is {request.status.value}")
    if request.num_tokens == 0:
        raise InvalidRequestError("prompt: has no tokens", param="prompt")
    if request.params.beams:
        _check_beams(request, kv, limits)
    max_tokens = request.params.max_tokens
    needed = request.num_tokens + (1 if max_tokens is None else max_tokens)
    if kv.can_ever_fit(needed):
        return
    pool = f"the pool has {kv.max_positions} ({kv.target.num_blocks} blocks of {kv.block_size})"
    if not kv.can_ever_fit(request.num_tokens + 1):
        raise CapacityError(
            f"prompt: {request.num_tokens} tokens and 1 of the answer need {request.num_tokens + 1} KV positions; "
            f"{pool}: shorten the prompt or raise kv_memory",
            param="prompt",
        )
    raise CapacityError(
        f"max_tokens: a prompt of {request.num_tokens} tokens and {max_tokens} of the answer need {needed} KV "
        f"positions; {pool}: shorten the prompt, ask for less or raise kv_memory",
        param="max_tokens",
    )


def _check_beams(request: Request, kv: KVManager, limits: SchedulerLimits) -> None:
    beams = request.params.beams
    if beams > limits.places:
        raise CapacityError(
            f"beam_width: {beams} beams run at once, the engine runs at most {limits.places}: lower beam_width or "
            "raise max_running and max_batched_tokens",
            param="beam_width",
        )
    max_tokens = request.params.max_tokens or 1
    needed = beam_blocks(request.num_tokens, max_tokens, beams, kv.block_size)
    if needed > kv.target.num_blocks:
        raise CapacityError(
            f"beam_width: {beams} beams of {request.num_tokens} prompt tokens and {max_tokens} of the answer need up "
            f"to {needed} KV blocks; the pool has {kv.target.num_blocks}: use fewer beams, ask for a shorter answer or "
            "raise kv_memory",
            param="beam_width",
        )
