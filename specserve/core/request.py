"""Request: tokens, how many of them are in the KV cache, and a status that only moves along a table.

There is no prefill phase and no decode phase. Each step moves ``num_computed`` toward ``num_tokens + len(draft)``;
that one rule is chunked prefill, prefix hits, speculation and resumption after preemption.
"""

from __future__ import annotations

import enum
from typing import Any

from specserve.core.sampling import SamplingParams
from specserve.core.tree import EMPTY_TREE, TokenTree


class Status(enum.Enum):
    """Where a request is. Compare by identity only; there is no order."""

    COMPILING = "compiling"  # its grammar is being compiled, outside the loop
    WAITING = "waiting"  # owns no KV
    RUNNING = "running"  # owns KV and is scheduled
    PREEMPTED = "preempted"  # gave its KV up; will be recomputed
    SWAPPED = "swapped"  # its KV is in the host pool
    FINISHED = "finished"  # terminal: completed, failed or aborted


_TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.COMPILING: frozenset({Status.WAITING, Status.FINISHED}),
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.SWAPPED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.SWAPPED: frozenset({Status.RUNNING, Status.PREEMPTED, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}
_BUMPS_EPOCH = frozenset({Status.PREEMPTED, Status.SWAPPED, Status.FINISHED})


class Family:
    """Sequences that begin with the same prompt and share its KV: the choices of one request, or its beams.

    Attributes:
        members: live ones, in order of index.
        in_step: beams: none goes on before all have computed their last token, and all give way together.
    """

    __slots__ = ("in_step", "members")

    def __init__(self, *, in_step: bool = False) -> None:
        self.in_step = in_step
        self.members: list[Request] = []


class Request:
    """One sequence being generated.

    Attributes:
        request_id: unique among live requests.
        token_ids: prompt and output so far; append through `append` only.
        num_prompt_tokens: how many of them are the prompt.
        params: sampling parameters, with `seed` filled in.
        namespace: prefix-cache namespace (authenticated tenant, model, adapter).
        priority: lower runs first under the priority policy.
        arrival: order of arrival; increasing, unique but for the members of one family.
        family, index: the sequences that it shares its prompt with (None: it is alone), and its number among them.
        places: running requests that it counts as: a beam search keeps room for its beams from the start.
        num_computed: tokens whose KV is in the target's cache (committed).
        num_cached: of the prompt, tokens that a prefix hit gave when it first ran.
        draft: pending draft for the next step; dropped by preemption.
        epoch: bumped by each preemption and by the end; results of an older epoch are dropped.
        kv: the manager's SequenceKV while it owns blocks (or host slots), else None.
    """

    __slots__ = (
        "arrival",
        "draft",
        "epoch",
        "family",
        "index",
        "kv",
        "namespace",
        "num_cached",
        "num_computed",
        "num_prompt_tokens",
        "params",
        "places",
        "priority",
        "request_id",
        "seed",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        namespace: str = "",
        priority: int = 0,
        arrival: int = 0,
        status: Status = Status.WAITING,
        family: Family | None = None,
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.namespace = namespace
        self.priority = priority
        self.arrival = arrival
        self.status = status
        self.family = family
        self.index = index
        self.places = 1
        self.num_computed = 0
        self.num_cached = 0
        self.draft: TokenTree = EMPTY_TREE
        self.epoch = 0
        self.kv: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def ready_to_draft(self) -> bool:
        """Running, and only its last token is not in the KV cache yet."""
        return self.status is Status.RUNNING and self.num_computed == self.num_tokens - 1

    @property
    def parked(self) -> bool:
        """A beam whose last token is computed: it waits for the other beams, then is told how to go on."""
        return self.family is not None and self.family.in_step and self.num_computed == len(self.token_ids)

    def append(self, tokens: tuple[int, ...]) -> None:
        self.token_ids.extend(tokens)

    def move_to(self, status: Status) -> None:
        """Change status along the table of allowed transitions.

        Raises:
            ValueError: the transition is not allowed.
        """
        if status not in _TRANSITIONS[self.status]:
            raise ValueError(f"request {self.request_id}: {self.status.value} -> {status.value} is not allowed")
        self.status = status
        if status in _BUMPS_EPOCH:
            self.epoch += 1
            self.draft = EMPTY_TREE

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        assert 0 <= self.num_computed <= self.num_tokens
        assert 0 < self.num_prompt_tokens <= self.num_tokens
        assert not (self.draft and self.status is not Status.RUNNING), "only running requests hold drafts"
        if self.status in (Status.WAITING, Status.COMPILING, Status.PREEMPTED, Status.FINISHED):
            assert self.kv is None, "no blocks are owned outside of running and swapped"
