"""Families: sequences of one prompt. It is computed once; whoever comes later forks what the first has of it."""

from __future__ import annotations

from typing import Literal

from specserve.core.request import Request, Status
from specserve.sched.policy import Verdict

_CHUNK = 64
Origin = tuple[Request, int] | Literal[Verdict.HELD] | None


def origin(request: Request) -> Origin:
    """What a waiting request begins on.

    Returns:
        The running member that shares most with it, and how many tokens to fork; None to begin alone; HELD while a
        member is still computing what both share, or an earlier one waits as well. The last known token is never
        forked: it is computed, as the next one is sampled from it.
    """
    family = request.family
    if family is None:
        return None
    most = request.num_tokens - 1
    best: Request | None = None
    shared = 0
    for member in family.members:
        if member.status is not Status.RUNNING:
            if member.index < request.index:
                return Verdict.HELD
            continue
        common = min(_common(request, member) if family.in_step else request.num_prompt_tokens, most)
        if common > member.num_computed:
            return Verdict.HELD
        if common > shared:
            best, shared = member, common
    return (best, shared) if best is not None else None


def _common(a: Request, b: Request) -> int:
    """Length of the common prefix: the prompt, and what of the output is equal."""
    i = a.num_prompt_tokens
    end = min(a.num_tokens, b.num_tokens)
    while i < end and a.token_ids[i : i + _CHUNK] == b.token_ids[i : i + _CHUNK]:
        i += _CHUNK
    while i < end and a.token_ids[i] == b.token_ids[i]:
        i += 1
    return min(i, end)


def private_blocks(request: Request, block_size: int) -> int:
    """Blocks that a member needs for its known tokens and the next one, beside full ones of the prompt."""
    prompt = min(request.num_prompt_tokens, request.num_tokens - 1)
    return -(-(request.num_tokens + 1) // block_size) - prompt // block_size


def other_beams(request: Request) -> list[Request]:
    """The other members of its beam search that wait too."""
    family = request.family
    if family is None or not family.in_step:
        return []
    return [m for m in family.members if m is not request and m.status is not Status.RUNNING]


def beam_blocks(num_prompt_tokens: int, max_tokens: int, beams: int, block_size: int) -> int:
    """Most blocks that a beam search holds at once: full blocks of the prompt once, the rest for each beam.

    One more while the block that several beams write next is copied.
    """
    prompt = num_prompt_tokens // block_size
    return prompt + beams * (-(-(num_prompt_tokens + max_tokens) // block_size) - prompt) + 1


def beam_room(num_prompt_tokens: int, beams: int, num_blocks: int, block_size: int) -> int:
    """Longest answer of which `beam_blocks` is no more than `num_blocks`; may be 0 or less."""
    prompt = num_prompt_tokens // block_size
    return ((num_blocks - 1 - prompt) // beams + prompt) * block_size - num_prompt_tokens
