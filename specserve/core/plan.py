"""StepPlan and StepResult: the only things that cross from the scheduler to the worker and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specserve.core.sampling import SamplingParams
from specserve.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole KV block `src` to `dst` before the forward (copy-on-write). `pool` is "target" or "draft"."""

    src: int
    dst: int
    pool: str = "target"


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """Move KV between device block `device` and host block `host` before the forward."""

    device: int
    host: int
    pool: str = "target"


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the worker meets for the first time, or again after preemption: its sampling state's source.

    Attributes:
        token_ids: prompt and committed output so far.
        num_prompt_tokens: how many of them are the prompt (penalties tell them apart).
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int


class ScheduledRequest(NamedTuple):
    """One request's rows of one step. One is made a request and step, and a named tuple is made in a third of the time.

    Attributes:
        token_ids: tokens to compute, at positions start, start + 1, ...; the last `len(draft)` are the draft's.
        start: position of the first; tokens before it are in the KV cache.
        draft: the pending draft (empty while a prompt is being computed). A chain in position order.
        block_ids: the target's block table; covers start + len(token_ids) positions.
        num_logits: rows at the end of `token_ids` that are sampled: 0 when the chunk ends inside the known
            tokens, else len(draft) + 1 (row j gives the token after j accepted draft tokens).
    """

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: Sequence[int]
    num_logits: int
    draft: TokenTree = EMPTY_TREE


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does. Decided and reserved by `Scheduler.schedule()`.

    Attributes:
        step: increasing number.
        requests: rows in the order in which they are computed.
        added: sampling states to create before the step; an id seen again replaces the older state.
        removed: ids whose sampling state is dropped before the step (finished, aborted, preempted).
        copies, swap_out, swap_in: KV moves, run in the order swap_out, swap_in, copies before the forward. Blocks that
            swap_out read may already belong to another request of the same plan; the host slots that swap_in reads
            and both ends of the copies stay referenced until `commit`. A plan may hold moves and no requests.
    """

    step: int
    requests: tuple[ScheduledRequest, ...]
    added: tuple[NewRequest, ...] = ()
    removed: tuple[str, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swap_out: tuple[BlockSwap, ...] = ()
    swap_in: tuple[BlockSwap, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one emitted token and of the most likely ones at its position.

    Attributes:
        logprob: of the emitted token; None where it is minus infinity.
        top_ids, top_logprobs: the most likely, best first.
    """

    token_id: int
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float | None, ...] = ()


class SampledTokens(NamedTuple):
    """What one request's rows gave. A named tuple for the reason ScheduledRequest is one.

    Attributes:
        token_ids: tokens emitted this step: the accepted draft tokens, then the target's own next one. Empty when
            no row was sampled. The engine cuts it where the answer ends, before `commit`.
        num_drafted, num_accepted: of the draft; num_accepted <= num_drafted.
        logprobs: one entry a token of token_ids where the request asked for them, else empty.
        candidates: of a beam (params.beams): one entry a sampled row, with the best continuations in top_ids; its
            token_id is -1. token_ids is empty as it leaves the executor: the engine chooses.
        error: why this request alone cannot go on (its options leave no token to choose), or None. token_ids is
            empty then, and the engine ends the request as failed.
    """

    request_id: str
    epoch: int
    token_ids: tuple[int, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    candidates: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry for each request of the plan, in its order."""

    step: int
    outputs: tuple[SampledTokens, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)  # seconds by phase ("forward", "sample", ...)
