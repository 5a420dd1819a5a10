"""Drives scheduler, drafters and LocalExecutor on tiny models as the engine does, without the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from specserve.cluster.local import LocalExecutor
from specserve.core.protocols import DraftContext
from specserve.core.request import Request
from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from specserve.models.kv_cache import PagedKVCache
from specserve.sched.scheduler import Scheduler, SchedulerLimits
from specserve.spec.combine import CombinedDrafter
from specserve.spec.controller import Controller
from specserve.spec.draft_model import DraftModelDrafter
from specserve.spec.suffix import SuffixDrafter
from specserve.worker.runner import ModelRunner
from tests.fakes.tiny_model import TinyModel

EOS = 0


class PatternMatcher:
    """A grammar over token ids: position i allows the ids of `pattern[i % len(pattern)]`, after `length` only EOS."""

    def __init__(self, pattern, length):
        self.pattern = [frozenset(p) for p in pattern]
        self.length = length
        self.accepted = []

    def _legal(self):
        if self.terminated:
            return frozenset()
        return frozenset([EOS]) if self.complete else self.pattern[len(self.accepted) % len(self.pattern)]

    def fill(self, mask, row):
        mask[row] = 0
        words = mask[row].view(np.uint32)
        for token in self._legal() or {EOS}:
            words[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token):
        if token not in self._legal():
            return False
        self.accepted.append(token)
        return True

    def rollback(self, n):
        assert 0 < n <= len(self.accepted)
        del self.accepted[-n:]

    def fork(self):
        copy = PatternMatcher(self.pattern, self.length)
        copy.accepted = list(self.accepted)
        return copy

    @property
    def terminated(self):
        return len(self.accepted) > self.length

    @property
    def complete(self):
        return len(self.accepted) == self.length


def _cache(model, blocks, block_size):
    if isinstance(model, TinyModel):
        return model.cache(blocks, block_size)
    i = model.info
    return PagedKVCache(i.num_layers, blocks, block_size, i.num_kv_heads, i.head_dim, i.dtype)


@dataclass
class Answer:
    token_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    illegal: int = 0
    steps: int = 0
    error: str | None = None
    sources: dict = field(default_factory=dict)


class Drive:
    """One engine on tiny models. `run` takes {id: (prompt, params)} and gives {id: Answer}."""

    def __init__(
        self,
        target=None,
        *,
        draft=None,
        methods=(),
        k=4,
        vocab=48,
        block_size=4,
        blocks=256,
        draft_blocks=None,
        chunk=64,
        max_running=16,
        max_model_len=512,
        controller=None,
        prefix_cache=True,
        catch_up=512,
        lookup=(2, 8),
    ):
        self.target = target or TinyModel(vocab=vocab)
        self.draft = draft
        self.vocab = vocab
        draft_pool = BlockPool(draft_blocks or blocks, block_size) if draft is not None else None
        self.kv = KVManager(BlockPool(blocks, block_size), draft_pool, prefix_cache=prefix_cache)
        limits = SchedulerLimits(chunk, max_running, 1000, max_model_len)
        self.scheduler = Scheduler(limits, self.kv)
        runner = ModelRunner(self.target, _cache(self.target, blocks, block_size))
        draft_runner = None
        if draft is not None:
            draft_runner = ModelRunner(draft, _cache(draft, draft_blocks or blocks, block_size), pool="draft")
        self.executor = LocalExecutor(runner, draft_runner, vocab_size=vocab, eos_ids=[EOS])
        self.drafter = CombinedDrafter([self._drafter(m, catch_up, lookup) for m in methods])
        self.controller = controller or Controller(k, max_model_len=max_model_len, adaptive=False, sources=methods)
        self.methods = methods
        self.on_step = None

    def _drafter(self, method, catch_up, lookup):
        if method == "suffix":
            return SuffixDrafter(*lookup, eos_ids=[EOS])
        return DraftModelDrafter(
            self.executor,
            self.kv,
            vocab_size=self.vocab,
            max_model_len=self.draft.info.max_position,
            eos_ids=[EOS],
            max_catch_up_rows=catch_up,
        )

    def run(self, jobs, matchers=None, stagger=0):
        """`stagger`: steps between arrivals."""
        self.matchers = dict(matchers or {})
        waiting = [
            Request(name, list(prompt), self._params(name, params), seed=params.seed or 0, arrival=i)
            for i, (name, (prompt, params)) in enumerate(jobs.items())
        ]
        self.answers = {r.request_id: Answer() for r in waiting}
        step = 0
        while waiting or self.scheduler.has_work:
            while waiting and (stagger == 0 or step % stagger == 0):
                self.scheduler.add(waiting.pop(0))
                if stagger:
                    break
            step += 1
            self._step()
            assert step < 5000
        assert self.kv.baseline()
        return self.answers

    def _params(self, name, params):
        """The executor looks for masks of guided requests alone."""
        return replace(params, guided={"regex": "a matcher's"}) if name in self.matchers else params

    def _step(self):
        self._draft()
        plan = self.scheduler.schedule()
        if plan is None:
            return
        if self.on_step:
            self.on_step(plan)
        masks = self._masks(plan)
        self.executor.forward(plan)
        result = self.executor.sample(plan, masks)
        ended = self._cut(plan, result)
        self.scheduler.commit(plan, self.result)
        self.scheduler.check()
        self.controller.observe(plan, self.result, 0.01)
        for name in ended:
            self.scheduler.finish(name)
            self.drafter.forget(name)
            self.controller.forget(name)
        self.scheduler.check()

    def _draft(self):
        if not self.methods:
            return
        ready = [r for r in self.scheduler.running if r.ready_to_draft]
        before = {n: list(m.accepted) for n, m in self.matchers.items()}
        contexts = [
            DraftContext(r, budget, self.matchers.get(r.request_id))
            for r, budget in zip(ready, self.controller.budgets(ready), strict=True)
            if budget > 0
        ]
        for context, tree in zip(contexts, self.drafter.propose(contexts), strict=True):
            tree.check()
            assert len(tree) <= context.budget
            context.request.draft = tree
        assert {n: m.accepted for n, m in self.matchers.items()} == before, "matchers are left as they were"

    def _masks(self, plan):
        masks = {}
        for r in plan.requests:
            matcher = self.matchers.get(r.request_id)
            if matcher is None or not r.num_logits:
                continue
            matcher = matcher.fork()
            mask = np.full((r.num_logits, -(-self.vocab // 32)), -1, dtype=np.int32)
            matcher.fill(mask, 0)
            for j, token in enumerate(r.draft.tokens, 1):
                if not matcher.accept(token):
                    self.answers[r.request_id].illegal += 1
                    break
                matcher.fill(mask, j)
            masks[r.request_id] = mask
        return masks

    def _cut(self, plan, result):
        outputs, ended = [], []
        for scheduled, output in zip(plan.requests, result.outputs, strict=True):
            request = self.scheduler.get(output.request_id)
            answer = self.answers[output.request_id]
            if output.error:
                answer.error = output.error
                ended.append(output.request_id)
            tokens = output.token_ids[: request.params.max_tokens - request.num_output_tokens]
            ends = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else (EOS,))}
            at = next((i for i, t in enumerate(tokens) if t in ends), None)
            tokens = tokens if at is None else tokens[: at + 1]
            if scheduled.num_logits:
                answer.steps += 1
                answer.drafted += output.num_drafted
                answer.accepted += output.num_accepted
            for source in scheduled.draft.sources:
                answer.sources[source] = answer.sources.get(source, 0) + 1
            answer.token_ids += tokens
            answer.logprobs += output.logprobs[: len(tokens)]
            matcher = self.matchers.get(output.request_id)
            if matcher is not None:
                assert all(matcher.accept(t) for t in tokens)
            if at is not None or len(answer.token_ids) == request.params.max_tokens:
                ended.append(output.request_id)
            outputs.append(output._replace(token_ids=tokens))
        self.result = replace(result, outputs=tuple(outputs))
        return ended
