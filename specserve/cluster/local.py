"""LocalExecutor: target and draft model in this process."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch

from specserve.core.plan import BlockCopy, SampledTokens, ScheduledRequest, StepPlan, StepResult, TokenLogprobs
from specserve.core.protocols import Bitmask, DraftRows
from specserve.spec.verify import Verified, verify
from specserve.worker.beams import continuations
from specserve.worker.logprobs import token_logprobs
from specserve.worker.runner import ModelRunner
from specserve.worker.sampler import RowGroup, Sampled, sample
from specserve.worker.states import StateTable

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
        self._logits = torch.empty(0, 0)
        self._timings: dict[str, float] = {}

    def forward(self, plan: StepPlan) -> None:
        """KV moves, sampling states, the target's forward.

        Raises:
            NotImplementedError: a draft is a tree with branches.
        """
        for scheduled in plan.requests:
            if not scheduled.draft.is_chain:
                raise NotImplementedError("drafts with branches need tree attention; this executor runs chains only")
        begin = time.perf_counter()
        self._states.update(plan.added, plan.removed)
        swapping = sum(runner.move(plan) for runner in self._runners)
        if plan.requests:
            self._logits = self._target.forward(plan.requests, [r.num_logits for r in plan.requests])
        self._timings = {"forward": time.perf_counter() - begin - swapping}
        if plan.swap_out or plan.swap_in:
            self._timings["swap"] = swapping

    @torch.inference_mode()
    def sample(self, plan: StepPlan, masks: Mapping[str, Bitmask]) -> StepResult:
        """Sample the rows, verify the drafts, and take the emitted tokens into the sampling states.

        Beams are not sampled: each gets its best continuations, and its state stays as it is.

        Raises:
            ValueError: a guided request with logits has no mask.
        """
        begin = time.perf_counter()
        groups = {}
        first = 0
        for r in plan.requests:
            if r.num_logits:
                groups[r.request_id] = self._group(r, first, masks.get(r.request_id))
                first += r.num_logits
        beams = {name: g for name, g in groups.items() if g.state.params.beams}
        candidates = dict(zip(beams, continuations(self._logits, list(beams.values()), self._vocab_size), strict=True))
        rest = [g for name, g in groups.items() if name not in beams]
        sampled = sample(self._logits, rest, self._vocab_size) if rest else Sampled([])
        outputs = []
        for r in plan.requests:
            found = candidates.get(r.request_id)
            outputs.append(_beam(r, found) if found else self._output(r, groups.get(r.request_id), sampled))
        self._logits = torch.empty(0, 0)
        return StepResult(plan.step, tuple(outputs), {**self._timings, "sample": time.perf_counter() - begin})

    @torch.inference_mode()
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

    def close(self) -> None:
        """Drop what the steps left behind; the models go with their last reference."""
        self._logits = torch.empty(0, 0)
        for runner in self._runners:
            runner.close()

    @property
    def _runners(self) -> list[ModelRunner]:
        return [self._target] if self._draft is None else [self._target, self._draft]

    def _group(self, r: ScheduledRequest, first: int, mask: Bitmask | None) -> RowGroup:
        state = self._states[r.request_id]
        p = state.params
        if p.guided is not None and mask is None:
            raise ValueError("a guided request came without its mask")  # never an unconstrained answer
        return RowGroup(
            state,
            first,
            r.num_logits,
            position=r.start + len(r.token_ids) - len(r.draft),
            chain=r.draft.tokens,
            mask=mask,
            keep_processed=p.logprobs is not None and p.logprobs_mode == "processed",
        )

    def _output(self, r: ScheduledRequest, group: RowGroup | None, sampled: Sampled) -> SampledTokens:
        if group is None:
            return SampledTokens(r.request_id, r.epoch)
        verified = verify(r.draft, sampled.token_ids[group.first : group.first + group.count])
        if not verified.token_ids:
            return SampledTokens(r.request_id, r.epoch, num_drafted=len(r.draft), error=NO_LEGAL_TOKEN)
        group.state.append(verified.token_ids)
        return SampledTokens(
            r.request_id,
            r.epoch,
            verified.token_ids,
            num_drafted=len(r.draft),
            num_accepted=verified.num_accepted,
            logprobs=self._logprobs(group, verified, sampled),
        )

    def _logprobs(self, group: RowGroup, verified: Verified, sampled: Sampled) -> tuple[TokenLogprobs, ...]:
        count = group.state.params.logprobs
        if count is None:
            return ()
        entries = []
        for row, token in zip(verified.rows, verified.token_ids, strict=True):
            at = group.first + row
            logits = sampled.processed[at] if group.keep_processed else self._logits[at, : self._vocab_size]
            entries.append(token_logprobs(logits, token, count))
        return tuple(entries)


def _beam(r: ScheduledRequest, candidates: tuple[TokenLogprobs, ...]) -> SampledTokens:
    # A row behind the draft that leaves no token is no error: without the draft it would not be there.
    if not candidates[0].top_ids:
        return SampledTokens(r.request_id, r.epoch, num_drafted=len(r.draft), error=NO_LEGAL_TOKEN)
    return SampledTokens(r.request_id, r.epoch, num_drafted=len(r.draft), candidates=candidates)
