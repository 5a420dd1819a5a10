"""A scheduler with a fake worker, small enough to reason about."""

from __future__ import annotations

from dataclasses import replace

from specserve.core.plan import StepPlan, StepResult
from specserve.core.request import Request, Status
from specserve.core.sampling import SamplingParams
from specserve.core.tree import TokenTree
from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from specserve.sched.scheduler import Scheduler, SchedulerLimits
from tests.fakes.worker import FakeWorker, next_token


class Bench:
    """One pool, one scheduler, one worker. `namespaces` maps a request id to its prefix-cache namespace."""

    def __init__(
        self, blocks: int = 32, size: int = 4, prefix_cache: bool = True, draft: int = 0, **limits: object
    ) -> None:
        draft_pool = BlockPool(draft, size) if draft else None
        self.kv = KVManager(BlockPool(blocks, size), draft_pool, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(SchedulerLimits(**limits), self.kv)  # type: ignore[arg-type]
        self.namespaces: dict[str, str] = {}
        self.worker = FakeWorker(blocks, size, lambda i: self.namespaces.get(i, ""))
        self.arrivals = 0

    def request(self, name: str, prompt: list[int], max_tokens: int | None = 8, **options: object) -> Request:
        self.namespaces[name] = str(options.get("namespace", ""))
        self.arrivals += 1
        params = SamplingParams(max_tokens=max_tokens)
        return Request(name, prompt, params, arrival=self.arrivals, **options)  # type: ignore[arg-type]

    def add(self, name: str, prompt: list[int], max_tokens: int | None = 8, **options: object) -> Request:
        request = self.request(name, prompt, max_tokens, **options)
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Commit as the engine does: outputs cut at max_tokens, finished requests ended."""
        outputs = []
        for output in result.outputs:
            request = self.scheduler.get(output.request_id)
            if request is not None and request.params.max_tokens is not None:
                left = request.params.max_tokens - request.num_output_tokens
                output = replace(output, token_ids=output.token_ids[:left])
            outputs.append(output)
        advanced = self.scheduler.commit(plan, replace(result, outputs=tuple(outputs)))
        self.scheduler.check()
        done = [r for r in advanced if r.num_output_tokens == r.params.max_tokens]
        for request in done:
            self.scheduler.finish(request.request_id)
        self.scheduler.check()
        return done

    def step(self) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.commit(plan, self.worker.run(plan))
        return plan

    def steps(self, most: int = 1000) -> None:
        """Until nothing is left."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests are left over")


def draft_for(request: Request, good: int, bad: int = 0, vocab: int = 5) -> TokenTree:
    """A chain of `good` tokens that the target would choose, then `bad` that it would not."""
    tokens = list(request.token_ids)
    for _ in range(good):
        tokens.append(next_token(tokens, vocab))
    for _ in range(bad):
        tokens.append((next_token(tokens, vocab) + 1) % vocab)
    return TokenTree.chain(tokens[request.num_tokens :], "fake")


def status_of(request: Request) -> Status:
    """Read anew: a type checker narrows attributes too far."""
    return request.status
