"""LocalExecutor: target and draft model in this process."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from specserve.core.plan import BlockCopy, SampledTokens, ScheduledRequest, StepPlan, StepResult, TokenLogprobs
from specserve.core.protocols import Bitmask, DraftRows
from specserve.core.tree import EMPTY_TREE
from specserve.kernels.cpu.memory import empty, populate
from specserve.kernels.cpu.sample import UNDECIDED
from specserve.spec.verify import NO_TOKEN, Verified, verify
from specserve.worker.beams import continuations
from specserve.worker.logprobs import token_logprobs
from specserve.worker.runner import ModelRunner
from specserve.worker.sampler import Logits, RowGroup, Sampled, as_tensor, draw, packed_rows, sample
from specserve.worker.states import StateTable

_NO_LOGITS: Logits = empty((0, 0))
NO_LEGAL_TOKEN = "the request's options leave no token to choose: its restrictions exclude each other"


class LocalExecutor:
    """Executor over a target runner, and DraftBackend over a draft runner.

    Args:
        vocab_size: ids with a meaning (the tokenizer's); what is beyond in either model's logits is padding.
        eos_ids: the model's end tokens.
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner | None = None,
        *,
        vocab_size: int,
        eos_ids: Collection[int] = (),
    ) -> None:
        self._target = target
        self._draft = draft
        self._vocab_size = vocab_size
        self._states = StateTable(vocab_size, eos_ids)
        self._logits = _NO_LOGITS
        self._best: list[int] | None = None  # the tokens, where no logits were asked for
        self._timings: dict[str, float] = {}

    def forward(self, plan: StepPlan) -> None:
        """KV moves, sampling states, the target's forward.

        Raises:
            NotImplementedError: a draft is a tree with branches.
        """
        for scheduled in plan.requests:
            if scheduled.draft is not EMPTY_TREE and scheduled.draft.tokens and not scheduled.draft.is_chain:
                raise NotImplementedError("drafts with branches need tree attention; this executor runs chains only")
        begin = time.perf_counter()
        self._states.update(plan.added, plan.removed)
        swapping = 0.0
        if plan.swap_out or plan.swap_in or plan.copies:
            swapping = sum(runner.move(plan) for runner in self._runners)
        self._best = None
        if plan.requests:
            wanted = [r.num_logits for r in plan.requests]
            if self._states.all_plain([r.request_id for r in plan.requests]) or all(map(self._plain, plan.requests)):
                self._best = self._target.best(plan.requests, wanted, self._vocab_size)
            elif self._states.all_packed and self._target.draws:
                self._draw(plan, wanted)
            else:
                self._logits = self._target.forward(plan.requests, wanted)
        self._timings = {"forward": time.perf_counter() - begin - swapping}
        if plan.swap_out or plan.swap_in:
            self._timings["swap"] = swapping

    def _draw(self, plan: StepPlan, wanted: Sequence[int]) -> None:
        """The forward and the tokens of its rows, or their logits where torch must decide one of them."""
        rows = packed_rows(self._rows(plan))
        assert rows is not None, "all are packed"
        tokens, logits = self._target.draw(plan.requests, wanted, self._vocab_size, rows)
        if UNDECIDED in tokens:
            self._logits = logits
        else:
            self._best = tokens

    def _rows(self, plan: StepPlan) -> list[tuple[bytes | None, int, int]]:
        """Packed options, position and number of the rows with logits of each request; see `packed_rows`."""
        states = self._states
        return [(states[r.request_id].packed, _position(r), r.num_logits) for r in plan.requests if r.num_logits]

    def sample(self, plan: StepPlan, masks: Mapping[str, Bitmask]) -> StepResult:
        """Sample the rows, verify the drafts, and take the emitted tokens into the sampling states.

        Beams are not sampled: each gets its best continuations, and its state stays as it is.

        Raises:
            ValueError: a guided request with logits has no mask, or there is one for a request that is not guided.
        """
        begin = time.perf_counter()
        if self._best is not None and masks:
            raise ValueError("a mask came for a request that is not guided: its token is chosen already")
        outputs = self._emit_best(plan, self._best) if self._best is not None else self._sample(plan, masks)
        self._best = None
        self._logits = _NO_LOGITS
        return StepResult(plan.step, tuple(outputs), {**self._timings, "sample": time.perf_counter() - begin})

    def _emit_best(self, plan: StepPlan, tokens: Sequence[int]) -> list[SampledTokens]:
        outputs = []
        end = 0
        for r in plan.requests:
            begin, end = end, end + r.num_logits
            outputs.append(self._emit(r, tokens[begin:end]) if r.num_logits else SampledTokens(r.request_id, r.epoch))
        return outputs

    def _emit(self, r: ScheduledRequest, tokens: Sequence[int]) -> SampledTokens:
        """What one plain request's sampled rows give."""
        if not r.draft.tokens and tokens[0] != NO_TOKEN:
            return SampledTokens(r.request_id, r.epoch, (tokens[0],))
        return _verdict(r, verify(r.draft, tokens))

    def _sample(self, plan: StepPlan, masks: Mapping[str, Bitmask]) -> list[SampledTokens]:
        if not masks and self._states.all_packed:
            tokens = draw(self._logits, self._rows(plan), self._vocab_size)
            if tokens is not None:
                return self._emit_best(plan, tokens)
        groups = {}
        first = 0
        for r in plan.requests:
            if r.num_logits:
                groups[r.request_id] = self._group(r, first, masks.get(r.request_id))
                first += r.num_logits
        beams = {name: g for name, g in groups.items() if g.state.params.beams}
        candidates = {}
        if beams:
            found = continuations(self._logits, list(beams.values()), self._vocab_size)
            candidates = dict(zip(beams, found, strict=True))
        rest = [g for name, g in groups.items() if name not in beams]
        sampled = sample(self._logits, rest, self._vocab_size) if rest else Sampled([])
        outputs = []
        for r in plan.requests:
            entries = candidates.get(r.request_id)
            outputs.append(_beam(r, entries) if entries else self._output(r, groups.get(r.request_id), sampled))
        return outputs

    def draft(self, rows: Sequence[DraftRows]) -> list[tuple[int, float]]:
        """One forward of the draft model; see DraftBackend."""
        if self._draft is None:
            raise RuntimeError("there is no draft model")
        logits = self._draft.forward(rows, [int(r.sample) for r in rows])
        chosen = [r for r in rows if r.sample]
        groups = [
            RowGroup(self._states[r.request_id], i, 1, r.start + len(r.token_ids), prefix=tuple(r.drafted), mask=r.mask)
            for i, r in enumerate(chosen)
        ]
        sampled = sample(logits, groups, self._vocab_size, probs=True)
        tokens = iter(zip(sampled.token_ids, sampled.probs, strict=True))
        return [next(tokens) if r.sample else (-1, 0.0) for r in rows]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of the draft's cache; see DraftBackend."""
        if self._draft is not None:
            self._draft.copy(copies)

    def measure_swap(self) -> float:
        """Seconds to move one block of the target and one of the draft one way; infinite without host memory.

        Call it before the first plan. Takes a few milliseconds, and leaves every cache and host slot as it was.
        """
        return sum(runner.measure_swap() for runner in self._runners)

    def populate(self) -> None:
        """Take the memory of the caches now, which the first tokens in each block would wait for otherwise."""
        for runner in self._runners:
            populate(runner.cache.memory)

    def close(self) -> None:
        """Drop what the steps left behind; the models go with their last reference."""
        self._logits = _NO_LOGITS
        for runner in self._runners:
            runner.close()

    @property
    def _runners(self) -> list[ModelRunner]:
        return [self._target] if self._draft is None else [self._target, self._draft]

    def _plain(self, r: ScheduledRequest) -> bool:
        """No logits of the request are needed, only its greedy tokens."""
        if not r.num_logits:
            return True
        state = self._states[r.request_id]
        return state.plain and not state.below_minimum(_position(r))

    def _group(self, r: ScheduledRequest, first: int, mask: Bitmask | None) -> RowGroup:
        state = self._states[r.request_id]
        p = state.params
        if p.guided is not None and mask is None:
            raise ValueError("a guided request came without its mask")  # never an unconstrained answer
        return RowGroup(
            state,
            first,
            r.num_logits,
            position=_position(r),
            chain=r.draft.tokens,
            mask=mask,
            keep_processed=p.logprobs is not None and p.logprobs_mode == "processed",
        )

    def _output(self, r: ScheduledRequest, group: RowGroup | None, sampled: Sampled) -> SampledTokens:
        if group is None:
            return SampledTokens(r.request_id, r.epoch)
        verified = verify(r.draft, sampled.token_ids[group.first : group.first + group.count])
        if verified.token_ids:
            group.state.append(verified.token_ids)
        return _verdict(r, verified, self._logprobs(group, verified, sampled))

    def _logprobs(self, group: RowGroup, verified: Verified, sampled: Sampled) -> tuple[TokenLogprobs, ...]:
        count = group.state.params.logprobs
        if count is None:
            return ()
        entries = []
        for row, token in zip(verified.rows, verified.token_ids, strict=True):
            at = group.first + row
            logits = sampled.processed[at] if group.keep_processed else self._logits[at, : self._vocab_size]
            entries.append(token_logprobs(as_tensor(logits), token, count))
        return tuple(entries)


def _position(r: ScheduledRequest) -> int:
    """Of the token that the first sampled row gives."""
    return r.start + len(r.token_ids) - len(r.draft)


def _verdict(r: ScheduledRequest, verified: Verified, logprobs: tuple[TokenLogprobs, ...] = ()) -> SampledTokens:
    if not verified.token_ids:
        return SampledTokens(r.request_id, r.epoch, num_drafted=len(r.draft), error=NO_LEGAL_TOKEN)
    return SampledTokens(
        r.request_id,
        r.epoch,
        verified.token_ids,
        num_drafted=len(r.draft),
        num_accepted=verified.num_accepted,
        logprobs=logprobs,
    )


def _beam(r: ScheduledRequest, candidates: tuple[TokenLogprobs, ...]) -> SampledTokens:
    # A row behind the draft that leaves no token is no error: without the draft it would not be there.
    if not candidates[0].top_ids:
        return SampledTokens(r.request_id, r.epoch, num_drafted=len(r.draft), error=NO_LEGAL_TOKEN)
    return SampledTokens(r.request_id, r.epoch, num_drafted=len(r.draft), candidates=candidates)
