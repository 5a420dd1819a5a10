"""FakeWorker: executes plans on simulated KV memory and "samples" from a fixed function of the tokens before.

The KV of a position depends on the namespace and on every token up to it, as a real model's does; a row is refused
unless all that it attends to is really there, so that any mistake in block tables, copies, swaps or the prefix cache
shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from specserve.core.plan import (
    BlockCopy,
    BlockSwap,
    NewRequest,
    SampledTokens,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

Value = tuple[str, tuple[int, ...]]


def kv_value(namespace: str, tokens: Sequence[int], position: int) -> Value:
    """What a model's KV at `position` stands for: the namespace and all tokens up to it."""
    return namespace, tuple(tokens[: position + 1])


def _digest(tokens: Sequence[int], salt: int) -> bytes:
    text = repr((salt, tuple(tokens)) if salt else tuple(tokens))
    return hashlib.sha256(text.encode()).digest()


def next_token(tokens: Sequence[int], vocab: int = 5, salt: int = 0) -> int:
    """The target's deterministic choice after `tokens`; each `salt` has its own, as each seed has."""
    return _digest(tokens, salt)[0] % vocab


def best_tokens(tokens: Sequence[int], count: int, vocab: int = 5, salt: int = 0) -> TokenLogprobs:
    """The best continuations of a beam: `next_token` first, then the ids after it, as far apart as `tokens` say."""
    first = next_token(tokens, vocab, salt)
    apart = 0.5 + _digest(tokens, salt)[1] / 256
    top = range(min(count, vocab))
    return TokenLogprobs(
        token_id=-1,
        logprob=None,
        top_ids=tuple((first + i) % vocab for i in top),
        top_logprobs=tuple(-apart * (i + 1) for i in top),
    )


def expected_tokens(prompt: Sequence[int], max_tokens: int, vocab: int = 5, salt: int = 0) -> list[int]:
    """What a request alone yields."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, vocab, salt))
    return tokens


class FakeWorker:
    """Runs plans.

    Args:
        num_blocks, block_size: of the target's memory.
        namespace, salt: of a request id.
        host_blocks: of the host memory of each pool.
        draft_blocks: of the draft's memory, which plans only swap: a test writes what it wants to find there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        namespace: Callable[[str], str] = lambda _: "",
        *,
        salt: Callable[[str], int] = lambda _: 0,
        host_blocks: int = 0,
        draft_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.memory: list[Value | None] = [None] * (num_blocks * block_size)
        self.draft_memory: list[Value | None] = [None] * (draft_blocks * block_size)
        self.host: dict[str, list[list[Value | None] | None]] = {p: [None] * host_blocks for p in ("target", "draft")}
        self.states: dict[str, list[int]] = {}
        self.beams: dict[str, int] = {}  # of the requests that are beams: candidates to give
        self.namespace = namespace
        self.salt = salt
        self.max_rows = 0
        self.abandoned = False  # a plan was: states may be removed that were never added, or twice

    def run(self, plan: StepPlan) -> StepResult:
        """All of one step."""
        self.forward(plan)
        return self.sample(plan)

    def sample(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(self._sample(entry) for entry in plan.requests))

    def forward(self, plan: StepPlan) -> None:
        self.move(plan)
        for entry in plan.requests:
            self._write(entry)
        self.max_rows = max(self.max_rows, plan.num_rows)

    def move(self, plan: StepPlan) -> None:
        """What comes before the forward."""
        self._update_states(plan.removed, plan.added)
        self._swap(plan)
        assert all(copy.pool == "target" for copy in plan.copies)
        self.copy(plan.copies)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        size = self.block_size
        for copy in copies:
            memory = self.memory if copy.pool == "target" else self.draft_memory
            memory[copy.dst * size : (copy.dst + 1) * size] = memory[copy.src * size : (copy.src + 1) * size]

    def _swap(self, plan: StepPlan) -> None:
        """Out, then in. A slot keeps what it has until it is written again."""
        for swap in plan.swap_out:
            memory, slots = self._pool(swap)
            slots[swap.host] = memory[swap.device * self.block_size : (swap.device + 1) * self.block_size]
        for swap in plan.swap_in:
            memory, slots = self._pool(swap)
            saved = slots[swap.host]
            assert saved is not None, "a host slot that was never written is swapped in"
            memory[swap.device * self.block_size : (swap.device + 1) * self.block_size] = saved

    def _pool(self, swap: BlockSwap) -> tuple[list[Value | None], list[list[Value | None] | None]]:
        memory, slots = {"target": self.memory, "draft": self.draft_memory}[swap.pool], self.host[swap.pool]
        assert 0 <= swap.device < len(memory) // self.block_size
        assert 0 <= swap.host < len(slots)
        return memory, slots

    def _update_states(self, removed: Sequence[str], added: Sequence[NewRequest]) -> None:
        for request_id in removed:
            if self.abandoned:
                self.states.pop(request_id, None)
            else:
                del self.states[request_id]
            self.beams.pop(request_id, None)
        for new in added:
            self.states[new.request_id] = list(new.token_ids)
            if new.params.beams:
                self.beams[new.request_id] = new.params.beams + len(new.params.stop_token_ids)

    def _slot(self, entry: ScheduledRequest, position: int) -> int:
        return entry.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, entry: ScheduledRequest) -> None:
        namespace = self.namespace(entry.request_id)
        num_known = len(entry.token_ids) - len(entry.draft)
        assert num_known >= 1
        if entry.request_id in self.beams:
            self._follow(entry, num_known)
        known = self.states[entry.request_id]
        assert list(entry.token_ids[:num_known]) == known[entry.start : entry.start + num_known]
        assert entry.token_ids[num_known:] == entry.draft.tokens
        tokens = [*known[: entry.start], *entry.token_ids]
        for position in range(entry.start):
            assert self.memory[self._slot(entry, position)] == kv_value(namespace, tokens, position)
        for position in range(entry.start, len(tokens)):
            self.memory[self._slot(entry, position)] = kv_value(namespace, tokens, position)

    def _follow(self, entry: ScheduledRequest, num_known: int) -> None:
        """What a beam's tokens are now, as its KV says: the engine chooses them, and need not tell."""
        before: tuple[int, ...] = ()
        if entry.start:
            value = self.memory[self._slot(entry, entry.start - 1)]
            assert value is not None
            before = value[1]
        known = [*before, *entry.token_ids[:num_known]]
        if entry.num_logits or len(known) > len(self.states[entry.request_id]):
            self.states[entry.request_id] = known

    def _sample(self, entry: ScheduledRequest) -> SampledTokens:
        """After every write of the step: nobody may have written over another's rows."""
        known = self.states[entry.request_id]
        tokens = [*known[: entry.start], *entry.token_ids]
        namespace = self.namespace(entry.request_id)
        for position in range(len(tokens)):
            assert self.memory[self._slot(entry, position)] == kv_value(namespace, tokens, position)
        complete = entry.start + len(entry.token_ids) - len(entry.draft) == len(known)
        assert entry.num_logits == (len(entry.draft) + 1 if complete else 0)
        if not complete:
            assert not entry.draft
            return SampledTokens(entry.request_id, entry.epoch)
        salt = self.salt(entry.request_id)
        count = self.beams.get(entry.request_id)
        if count is not None:
            rows = [[*known, *entry.draft.tokens[:j]] for j in range(entry.num_logits)]
            candidates = tuple(best_tokens(row, count, salt=salt) for row in rows)
            return SampledTokens(entry.request_id, entry.epoch, num_drafted=len(entry.draft), candidates=candidates)
        emitted = [next_token(known, salt=salt)]
        for drafted in entry.draft.tokens:
            if drafted != emitted[-1]:
                break
            emitted.append(next_token([*known, *emitted], salt=salt))
        known.extend(emitted)
        return SampledTokens(entry.request_id, entry.epoch, tuple(emitted), len(entry.draft), len(emitted) - 1)
